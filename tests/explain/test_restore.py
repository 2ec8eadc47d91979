"""A token brought back, against eager attention with a mask written here; votes and estimates."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

import kvprune
import traces
import zoo
from kvprune import NEVER, PruneError
from kvprune.explain import Trace
from kvprune.explain.estimate import estimated_change
from kvprune.explain.misses import Trial, promising, verify, worst
from kvprune.explain.replay import losses, recorded, row

FAMILIES = ["gpt2", "llama", "qwen3", "gemma2", "gpt_oss"]
LONG = f"{traces.TEXT} {traces.TEXT}"


@pytest.fixture(scope="module")
def tok():
    return traces.tokenizer()


def plain_losses(family: str, ids: tuple[int, ...], visible: dict[int, np.ndarray]) -> np.ndarray:
    """-log p of each token by the model without kvprune, its layers masked as `visible` says.

    visible: layer → (T, T), query × key. Eager attention in loops over heads.
    """

    def masked(module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, **kwargs):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        T, group = query.shape[2], query.shape[1] // key.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        window = getattr(module, "sliding_window", None)
        if window:
            causal &= torch.arange(T)[:, None] - torch.arange(T) < window
        seen = visible.get(module.layer_idx)
        seen = causal if seen is None else torch.from_numpy(seen)[:T, :T]
        heads = []
        for h in range(query.shape[1]):
            logits = query[0, h] @ key[0, h // group].T * scaling
            if softcap is not None:
                logits = torch.tanh(logits / softcap) * softcap
            logits = logits.masked_fill(~seen, -torch.inf)
            if s_aux is not None:
                logits = torch.cat([logits, s_aux[h].expand(T, 1)], 1)
            heads.append(logits.softmax(-1)[:, :T] @ value[0, h // group])
        return torch.stack(heads, 1)[None], None

    AttentionInterface.register("plain_masked", masked)
    model = zoo.make(family, vocab_size=traces.VOCAB)
    model.set_attn_implementation("plain_masked")
    with torch.no_grad():
        log_p = model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
    later = [float(-log_p[i, token]) for i, token in enumerate(ids[1:])]
    return np.array([np.nan, *later])


def visible_layers(trace: Trace) -> dict[int, np.ndarray]:
    return {index: trace.visible(number) for number, index in enumerate(trace.layers)}


def a_dropped(trace: Trace, layer: int, before: int | None = None) -> int:
    """A token that this layer drops early."""
    step = trace.drop_step[layer]
    return int(np.argmin(np.where(step < (before or NEVER), step, NEVER)))


@pytest.mark.parametrize("options", [{}, {"depth_tied": True}, {"protect_recent": 3}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_restore_equals_a_plain_pass_with_one_column_unmasked(tok, family, options):
    trace = Trace.from_text(traces.pruned_model(family, **options), tok, traces.TEXT, cost=True)
    visible = visible_layers(trace)
    np.testing.assert_allclose(trace.loss, plain_losses(family, trace.ids, visible), atol=1e-4)
    layer = len(trace.layers) - 1
    token = a_dropped(trace, layer)
    column = np.arange(len(trace.ids)) >= token

    one = {index: mask.copy() for index, mask in visible.items()}
    one[trace.layers[layer]][:, token] = column
    got = trace.restore(token, layer)
    np.testing.assert_allclose(got, plain_losses(family, trace.ids, one), atol=1e-4)
    assert np.nanmax(np.abs(got - trace.loss)) > 1e-2
    dropped = int(trace.drop_step[layer, token])
    # the token that dropped it is the first to see it again, and predicts the next one
    np.testing.assert_allclose(got[: dropped + 1], trace.loss[: dropped + 1], atol=1e-5)

    for mask in visible.values():
        mask[:, token] = column
    want = plain_losses(family, trace.ids, visible)
    np.testing.assert_allclose(trace.restore(token), want, atol=1e-4)


@pytest.mark.parametrize("config", [kvprune.LocalConfig(4), kvprune.TovaConfig(9)], ids=str)
def test_restore_with_a_method_that_does_not_vote(tok, config):
    pruned = kvprune.attach(zoo.make("llama", vocab_size=traces.VOCAB), config)
    trace = Trace.from_text(pruned, tok, traces.TEXT)
    assert trace.votes is None
    with pytest.raises(PruneError, match=f"{config.method} does not vote"):
        trace.scores(0, 0)
    visible, token = visible_layers(trace), a_dropped(trace, 1)
    visible[1][:, token] = np.arange(len(trace.ids)) >= token
    want = plain_losses("llama", trace.ids, visible)
    np.testing.assert_allclose(trace.restore(token, 1), want, atol=1e-4)


def test_restoring_nothing_and_everything(tok):
    trace = Trace.from_text(traces.pruned_model("llama"), tok, traces.TEXT, cost=True)
    kept = int(np.nonzero((trace.drop_step == NEVER).all(0))[0][0])
    for losses_again in (trace.restore_all([]), trace.restore(kept), trace.restore(kept, 1)):
        np.testing.assert_array_equal(losses_again, trace.loss)
    everything = trace.restore_all([(token, None) for token in range(len(trace.ids))])
    np.testing.assert_allclose(everything, trace.open_loss, atol=1e-5)
    # without an adapter the dense model is the same with open gates
    np.testing.assert_array_equal(trace.open_loss, trace.dense_loss)
    np.testing.assert_allclose(trace.dense_loss, plain_losses("llama", trace.ids, {}), atol=1e-4)
    assert trace.dense == "base model"
    several = [(a_dropped(trace, 0), 0), (a_dropped(trace, 1), None)]
    visible = visible_layers(trace)
    for token, layer in several:
        for index in trace.layers if layer is None else [trace.layers[layer]]:
            visible[index][:, token] = np.arange(len(trace.ids)) >= token
    want = plain_losses("llama", trace.ids, visible)
    np.testing.assert_allclose(trace.restore_all(several), want, atol=1e-4)


def test_measuring_leaves_the_model_as_it_was(tok):
    pruned = traces.pruned_model("llama")
    pruned.model.train()
    pruned.model.requires_grad_(False)
    pruned.interactions[0].beta.requires_grad_(True)
    ids = torch.tensor([tok(traces.TEXT).input_ids])
    before = pruned.trace(ids)
    Trace.from_text(pruned, tok, traces.TEXT, misses=1)
    assert pruned.model.training
    assert [p for p in pruned.model.parameters() if p.requires_grad] == [
        pruned.interactions[0].beta
    ]
    assert pruned.working is pruned.config
    assert pruned.observer is None
    assert not pruned.model.get_input_embeddings()._forward_hooks
    assert torch.equal(pruned.trace(ids), before)


def test_restore_refuses_what_it_cannot_do(tok, tmp_path):
    pruned = traces.pruned_model("llama")
    trace = Trace.from_text(pruned, tok, traces.TEXT)
    T = len(trace.ids)
    with pytest.raises(PruneError, match=f"token {T} is not in the text; it has tokens 0 to"):
        trace.restore(T)
    with pytest.raises(PruneError, match="token -1 is not"):
        trace.restore(-1)
    with pytest.raises(PruneError, match="layer 3 is not in the trace; 0 to 2 stand for"):
        trace.restore(0, 3)
    loaded = Trace.load(trace.save(tmp_path / "t.npz"))
    with pytest.raises(PruneError, match="pass the model that it was made with as pruned="):
        loaded.restore(0)
    np.testing.assert_array_equal(loaded.restore(2, pruned=pruned), trace.restore(2))
    with pytest.raises(
        PruneError, match=r"3 layers \(0, 1, 2\), but this model prunes 2: \(1, 3\)"
    ):
        loaded.restore(0, pruned=traces.pruned_model("gemma2"))
    small = kvprune.attach(zoo.make("llama"))
    with pytest.raises(PruneError, match="but this model knows 101"):
        loaded.restore(0, pruned=small)
    pruned.name = "mine"
    with pytest.raises(PruneError, match="the adapter 'other', but this is 'mine'"):
        replace(trace, adapter="other").restore(0)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss"])
def test_estimate_is_exact_in_its_layer_and_first_order_above(tok, family):
    """The derivative of the loss along the change of one layer's output, by finite differences."""
    pruned = traces.pruned_model(family)
    trace = Trace.from_text(pruned, tok, LONG)
    target, layer = len(trace.ids) - 1, 0
    token = a_dropped(trace, layer, before=target)
    changes = attention_change(pruned, trace, token, layer)
    slope = (loss_with(pruned, trace, layer, changes, 1e-3, target)
             - loss_with(pruned, trace, layer, changes, -1e-3, target)) / 2e-3  # fmt: skip
    estimate = estimated_change(pruned, trace.ids, trace.drop_step, target)
    assert estimate[layer, token] == pytest.approx(slope, rel=2e-2, abs=1e-4)
    assert abs(slope) > 1e-3
    kept = trace.drop_step[:, :target] >= target
    assert not estimate[:, :target][kept].any()
    assert not estimate[:, target:].any()
    assert (estimate[:, :target][~kept] != 0).mean() > 0.9


def attention_change(pruned, trace, token, layer) -> torch.Tensor:
    """By how much the layer's attention output changes with the token back, below unchanged."""
    outputs = []

    def keep(seen):
        if seen.layer == layer:
            outputs.append(seen.output.detach())

    with pruned.observing(keep):
        trace.restore_all([])
        trace.restore(token, layer)
    return outputs[1] - outputs[0]


def loss_with(pruned, trace, layer, changes, scale, target) -> float:
    """The target's loss with a part of the change added to the layer's attention output."""

    def add(seen):
        if seen.layer == layer:
            seen.output.add_(scale * changes)

    with pruned.observing(add):
        return float(trace.restore_all([])[target])


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_misses_and_their_returns(tok, family):
    pruned = traces.pruned_model(family)
    trace = Trace.from_text(pruned, tok, LONG, misses=3)
    cost = trace.loss - trace.dense_loss
    order = np.argsort(-np.nan_to_num(cost, nan=-1e9))[:3]
    assert [miss.token for miss in trace.misses] == order.tolist()
    for miss in trace.misses:
        assert (miss.loss, miss.dense_loss) == (
            trace.loss[miss.token],
            trace.dense_loss[miss.token],
        )
        assert miss.open_loss == trace.open_loss[miss.token]
        assert miss.cost == pytest.approx(cost[miss.token])
        returns = [back.loss for back in miss.returns]
        assert returns == sorted(returns)
        assert 2 <= len(miss.returns) <= 4
        assert len(set(miss.returns)) == len(miss.returns)
        for back in miss.returns:
            want = trace.restore(back.token, back.layer)[miss.token]
            assert back.loss == pytest.approx(want, abs=1e-4)
            rows = trace.drop_step[:, back.token]
            assert (rows if back.layer is None else rows[back.layer]).min() < miss.token
    assert min(miss.returns[0].loss - miss.loss for miss in trace.misses) < -0.5


def test_each_trial_equals_restoring_its_places(tok):
    """Trials that part at any token, also at the last one and not at all."""
    trace = Trace.from_text(traces.pruned_model("llama"), tok, LONG)
    rng = np.random.default_rng(0)
    trials = []
    for target in (1, 2, 17, len(trace.ids) - 1):
        for _ in range(6):
            tokens = rng.integers(0, len(trace.ids), 2)
            layer = None if rng.random() < 0.5 else int(rng.integers(0, 3))
            trials.append(Trial(target, tuple((int(token), layer) for token in tokens)))
    # dropped by the token right before the target: one token is left to read
    layer, token = np.argwhere(trace.drop_step == len(trace.ids) - 2)[0].tolist()
    trials.append(Trial(len(trace.ids) - 1, ((token, layer),)))
    found = dict(verify(trace.pruned, trace.ids, trace.drop_step, trials))
    assert set(found) == set(trials)
    for trial, loss in found.items():
        want = trace.restore_all(trial.places)[trial.target]
        assert loss == pytest.approx(want, abs=1e-4)


def test_worst_and_promising_against_loops():
    rng = np.random.default_rng(0)
    loss, dense = rng.random(20), rng.random(20)
    loss[0] = dense[0] = np.nan
    cost = {token: loss[token] - dense[token] for token in range(1, 20)}
    order = sorted(cost, key=cost.get, reverse=True)
    assert worst(loss, dense, 5) == order[:5]
    assert worst(loss, dense, 99) == [token for token in order if cost[token] > 0]
    assert worst(dense, dense, 5) == []
    estimate = rng.normal(size=(3, 8)) * (rng.random((3, 8)) < 0.6)
    estimate[:, 7] = [0, -9, 0]
    got = promising(estimate, 7)
    whole = sorted(range(8), key=lambda token: estimate[:, token].sum())[:4]
    assert got[:4] == [(token, None) for token in whole]
    assert got[0] == (7, None)
    several = [
        (estimate[layer, token], token, layer)
        for layer in range(3) for token in range(8)
        if estimate[layer, token] and np.count_nonzero(estimate[:, token]) > 1
    ]  # fmt: skip
    assert got[4:] == [(token, layer) for _, token, layer in sorted(several)[:3]]
    assert promising(np.abs(estimate), 4) == []


def test_loss_of_one_token_and_of_a_generated_text(tok):
    pruned = traces.pruned_model("llama")
    one = Trace.from_text(pruned, tok, "a", misses=2)
    assert np.isnan(one.loss).all()
    assert one.misses == ()
    assert np.isnan(losses(pruned, [3])).all()
    out, inputs = traces.generate_batch(pruned, tok, [traces.TEXT])
    trace = Trace.from_generate(out, tok, inputs.input_ids, pruned=pruned)[0].with_cost()
    want = plain_losses("llama", trace.ids, visible_layers(trace))
    np.testing.assert_allclose(trace.loss, want, atol=1e-4)
    assert trace.settings["rank"] == 8
    again = Trace.from_generate(out, tok, inputs.input_ids)[0]
    assert again.votes is None
    np.testing.assert_array_equal(again.with_cost(pruned).loss, trace.loss)


@pytest.mark.parametrize("store", ["slots", "extents"])
@pytest.mark.parametrize("part", [1, 2, 7])
def test_a_record_read_in_parts_equals_one_pass(tok, part, store):
    """Some tokens leave at once, more than come in: their slots are free, but not packed away."""
    pruned, T = traces.pruned_model("llama"), 150
    rng = np.random.default_rng(0)
    ids, step = rng.integers(3, 1000, T).tolist(), np.full((3, T), NEVER)
    for layer in range(3):
        for now in (60, 91, 125):
            step[layer, rng.choice(np.nonzero(step[layer, :now] == NEVER)[0], 5, False)] = now
    method, holes = recorded(pruned, step), 0
    with pruned.evaluating(), pruned.following(method), torch.no_grad():
        want = pruned.model(row(pruned, ids), use_cache=False).logits
        np.testing.assert_array_equal(pruned.last_pass.drop_step()[:, 0], step)
        cache, got = kvprune.PrunedCache(pruned, store=store), []
        for start in range(0, T, part):
            ids_part = row(pruned, ids[start : start + part])
            got.append(pruned.model(ids_part, past_key_values=cache).logits)
            holes += int((~cache.stores[0].table.get().valid).sum())
    torch.testing.assert_close(torch.cat(got, 1), want, atol=1e-3, rtol=1e-4)
    # decoding packs the slots itself, seven new tokens fill them all, and extents have no holes
    assert bool(holes) == (part == 2 and store == "slots")
