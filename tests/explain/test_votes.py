"""Scores and runners-up against plain double loops; names, settings and files of traces."""

import copy
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvprune
import oracle
import traces
import zoo
from helpers import uneven_gates
from kvprune import NEVER, PruneError
from kvprune.adapters import lora
from kvprune.explain import Trace
from kvprune.explain.cost import Miss, Return
from kvprune.explain.votes import Votes

OPTIONS = [
    {}, {"protect_first": 2, "protect_recent": 5}, {"threshold": 0.5}, {"depth_tied": True},
]  # fmt: skip


@pytest.fixture(scope="module")
def tok():
    return traces.tokenizer()


def hidden_states(pruned, ids) -> list[torch.Tensor]:
    """The input of each pruned attention module, in a pass as recorded: (T, width)."""
    found = []

    def note(module, args, kwargs):
        found.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handles = [
        site.module.register_forward_pre_hook(note, with_kwargs=True) for site in pruned.sites
    ]
    pruned.trace(list(ids))
    for handle in handles:
        handle.remove()
    return [hidden[0] for hidden in found]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_scores_margins_and_runners_up_against_double_loops(tok, family, options):
    pruned = traces.pruned_model(family, **options)
    trace = Trace.from_text(pruned, tok, traces.TEXT)
    T, first = len(trace.ids), options.get("protect_first", 0)
    recent, threshold = options.get("protect_recent", 0), options.get("threshold", 0.0)
    crossed = 0
    for l, hidden in enumerate(hidden_states(pruned, trace.ids)):
        interaction = pruned.layers[l].interaction
        q = (hidden @ interaction.query.weight.T).detach()
        k = (hidden @ interaction.key.weight.T).detach()
        beta = float(interaction.beta.detach())
        for j in range(T):
            scores = trace.scores(j, l)
            assert np.isnan(scores[: j + 1]).all()
            runners = []
            for i in range(j + 1, T):
                want = float((q[i] * k[j]).sum() / 8**0.5) + beta
                assert scores[i] == pytest.approx(want, abs=1e-4)
                counts = j >= first and i - j > recent
                if i > trace.drop_step[l, j] and counts and want <= threshold:
                    runners.append(i)
            step = int(trace.drop_step[l, j])
            if step == NEVER:
                assert np.isnan(trace.score[l, j])
                assert np.isnan(trace.margin[l, j])
                assert not runners
            else:
                assert trace.score[l, j] == pytest.approx(scores[step], abs=1e-5)
                assert trace.margin[l, j] == pytest.approx(threshold - scores[step], abs=1e-5)
                # in a tied layer, a drop may be that of a layer below
                assert trace.margin[l, j] >= 0 or options.get("depth_tied")
                crossed += trace.margin[l, j] < 0
            assert trace.runners_up(j, l) == runners[:3]
            assert trace.runners_up(j, l, most=99) == runners
            padded = [*runners[:3], NEVER, NEVER, NEVER][:3]
            assert trace.runner_steps[l, j].tolist() == padded
            np.testing.assert_allclose(
                trace.runner_scores[l, j],
                [scores[i] if i < NEVER else np.nan for i in padded], atol=1e-5,
            )  # fmt: skip
    assert (trace.runner_steps < NEVER).any()
    assert bool(crossed) == bool(options.get("depth_tied"))


def test_the_votes_explain_every_drop(tok):
    """The first vote that counts and is low enough is the recorded drop, by the oracle's loops."""
    trace = Trace.from_text(traces.pruned_model("llama", protect_recent=3), tok, traces.TEXT)
    votes = trace.votes
    for l in range(len(trace.layers)):
        # the oracle divides by √r itself
        q, k = (torch.from_numpy(x[l : l + 1]).double() for x in (votes.q_int, votes.k_int))
        want = oracle.drop_step(q * 8**0.5, k, float(votes.beta[l]), protect_recent=3)
        assert want[0].tolist() == trace.drop_step[l].tolist()


def test_votes_of_a_generated_text_equal_those_of_one_pass(tok):
    pruned = traces.pruned_model("llama")
    out, inputs = traces.generate_batch(pruned, tok, [traces.TEXT, "Why"])
    found = Trace.from_generate(out, tok, inputs.input_ids, inputs.attention_mask, pruned)
    assert len(found) == 2
    for trace in found:
        once = Trace.from_ids(pruned, tok, trace.ids)
        # the last token was not processed and so drops nothing, which in one pass it does
        for name in ("q_int", "k_int"):
            own, other = (getattr(x.votes, name)[:, :-1] for x in (trace, once))
            np.testing.assert_allclose(own, other, atol=1e-4)
    plain = Trace.from_generate(out, tok, inputs.input_ids, inputs.attention_mask)[0]
    assert plain.votes is None
    with pytest.raises(PruneError, match="no votes"):
        plain.runners_up(0, 0)
    assert Trace.from_ids(pruned, tok, trace.ids, votes=False).votes is None


def test_settings_are_those_in_force(tok):
    pruned = traces.pruned_model("llama", protect_first=1)
    pruned.adjust(threshold=0.25, protect_recent=4)
    trace = Trace.from_text(pruned, tok, traces.TEXT)
    want = {"method": "pruning", "threshold": 0.25, "protect_first": 1, "protect_recent": 4,
            "rank": 8, "dtype": "float32"}  # fmt: skip
    assert want.items() <= trace.settings.items()
    assert (trace.votes.threshold, trace.votes.protect_first) == (0.25, 1)
    with pruned.dense():
        dense = Trace.from_text(pruned, tok, traces.TEXT)
    assert dense.settings == {"method": "dense", "dtype": "float32"}
    assert dense.votes is None
    with pytest.raises(PruneError, match="dense does not vote"):
        dense.scores(0, 0)


@pytest.mark.parametrize("merge", [False, True])
def test_a_trace_names_its_adapter_and_its_dense_model(tok, tmp_path, merge):
    """With LoRA dense is the base model; merged, its weights are gone, and open gates stand in."""
    model = zoo.make("llama", vocab_size=traces.VOCAB)
    lora.add(model, 2, 4.0)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
    uneven_gates(pruned)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    pruned.save(tmp_path / "strength-80")
    assert pruned.name == ""
    plain = zoo.make("llama", vocab_size=traces.VOCAB)
    base = Trace.from_text(kvprune.attach(plain), tok, traces.TEXT, cost=True).open_loss
    loaded = kvprune.load(
        zoo.make("llama", vocab_size=traces.VOCAB), tmp_path / "strength-80", merge=merge
    )
    trace = Trace.from_text(loaded, tok, traces.TEXT, cost=True)
    assert trace.adapter == "strength-80"
    assert np.nanmax(np.abs(trace.open_loss - base)) > 1e-2
    if merge:
        assert trace.dense == "open gates"
        np.testing.assert_array_equal(trace.dense_loss, trace.open_loss)
    else:
        assert trace.dense == "base model"
        np.testing.assert_allclose(trace.dense_loss, base, atol=1e-5)


def full_trace(tok) -> Trace:
    trace = Trace.from_text(traces.pruned_model("llama"), tok, traces.TEXT, misses=2)
    assert all(miss.returns for miss in trace.misses)
    return replace(trace, adapter="mine")


@pytest.mark.parametrize("name", ["t.json", "t.npz"])
def test_save_and_load_everything(tok, tmp_path, name):
    trace = full_trace(tok)
    again = Trace.load(trace.save(tmp_path / name))
    for field in ("adapter", "settings", "dense", "misses", "model", "tokens"):
        assert getattr(again, field) == getattr(trace, field)
    assert isinstance(again.misses[0], Miss)
    assert isinstance(again.misses[0].returns[0], Return)
    for field in ("loss", "dense_loss", "open_loss"):
        np.testing.assert_array_equal(getattr(again, field), getattr(trace, field))
    assert again.pruned is None
    assert (again.votes.threshold, again.votes.protect_recent) == (0.0, 0)
    # rounded to float16
    np.testing.assert_allclose(again.votes.q_int, trace.votes.q_int, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(again.score, trace.score, atol=2e-2)
    assert again.to_dict() == trace.to_dict()
    if name == "t.npz":
        assert (tmp_path / name).stat().st_size < trace.votes.q_int.nbytes * 2
    bare = Trace.load(replace(trace, votes=None, loss=None, misses=()).save(tmp_path / name))
    assert bare.votes is bare.loss is None
    assert bare.misses == ()


def test_values_too_large_for_float16_are_kept(tok, tmp_path):
    trace = full_trace(tok)
    large = replace(trace, votes=replace(trace.votes, q_int=trace.votes.q_int * 1e6))
    for name in ("t.json", "t.npz"):
        again = Trace.load(large.save(tmp_path / name))
        np.testing.assert_array_equal(again.votes.q_int, large.votes.q_int)


@pytest.mark.parametrize("suffix", ["json", "npz"])
def test_a_file_of_format_1_still_loads(tmp_path, suffix):
    trace = traces.random_trace(2, 5)
    new = trace.to_dict()
    names = ("tokens", "ids", "layers", "prompt", "kept_bytes", "dense_bytes", "model")
    old = {"format": 1, **{name: new[name] for name in names}}
    file = tmp_path / f"t.{suffix}"
    if suffix == "json":
        file.write_text(json.dumps({**old, "drop_step": new["drop_step"]}))
    else:
        about = np.frombuffer(json.dumps(old).encode(), dtype=np.uint8)
        np.savez_compressed(file, drop_step=np.array(new["drop_step"], np.int32), about=about)
    again = Trace.load(file)
    np.testing.assert_array_equal(again.drop_step, trace.drop_step)
    assert (again.adapter, again.settings, again.votes, again.loss) == ("", {}, None, None)
    assert again.to_dict() == new


def test_damaged_votes_and_losses_are_refused(tok, tmp_path):
    trace = full_trace(tok)
    values, file = trace.to_dict(), tmp_path / "t.json"
    votes, packed = values["votes"], values["votes"]["q_int"]
    T = len(trace.ids)
    for change, message in [
        ({"format": 3}, "format 1 or 2"),
        ({"loss": values["loss"][:-1]}, rf"loss has shape \({T - 1},\)"),
        ({"votes": {**votes, "q_int": {**packed, "base64": "?" + packed["base64"]}}}, "damaged"),
        ({"votes": {**votes, "q_int": {**packed, "shape": [1, 2, 3]}}}, "damaged"),
        ({"votes": {**votes, "q_int": {**packed, "dtype": "object"}}}, "damaged"),
        ({"votes": {**votes, "q_int": votes["beta"]}}, "do not fit"),
        ({"votes": {**votes, "more": 1}}, "damaged"),
        ({"votes": {"threshold": 0}}, "damaged"),
        ({"misses": [[1, 2.0]]}, "damaged"),
        ({"misses": [[T, 2.0, 1.0, 1.0, []]]}, f"token {T} is not in the text"),
        ({"misses": [[1, 2.0, 1.0, 1.0, [[0, 3, 1.0]]]]}, "layer 3 is not in the trace"),
        ({"settings": 3}, "must be a dictionary"),
    ]:
        file.write_text(json.dumps(values | change))
        with pytest.raises(PruneError, match=message):
            Trace.load(file)
    half = Votes(*(x[:, :3] for x in (trace.votes.q_int, trace.votes.k_int)), trace.votes.beta)
    with pytest.raises(PruneError, match=r"the votes are of \(3, 3\)"):
        replace(trace, votes=half)
    with pytest.raises(PruneError, match="NaN or Inf"):
        replace(trace.votes, beta=np.full(3, np.nan))


def test_a_copy_of_a_trace_does_not_copy_the_model(tok):
    trace = full_trace(tok)
    assert copy.deepcopy(trace).pruned is None
    data = pickle.dumps(trace)
    assert pickle.loads(data).to_dict() == trace.to_dict()
    assert "pruned" not in repr(trace).lower()
