"""attach: settings, measurements, errors, and detach."""

import copy

import pytest
import torch
from torch.testing import assert_close

import kvprune
import oracle
import zoo
from helpers import attach_uneven, random_ids, real_pairs, real_tokens, uneven_gates, visible
from kvprune import NEVER, PruneError, PruningConfig


@pytest.fixture
def model():
    return zoo.make("llama")


@pytest.fixture
def pruned(model):
    return attach_uneven(model, alpha=1.5)


def oracle_keeps(pruned, ids, real=None, alpha=None):
    """The keep of each layer by the oracle, from the hidden states that the layer received."""
    hidden = {}
    hooks = [
        layer.interaction.register_forward_hook(
            lambda module, args, output, layer=layer: hidden.__setitem__(layer.name, args[0])
        )
        for layer in pruned.layers
    ]
    with torch.no_grad():
        pruned.model(ids, attention_mask=None if real is None else real.long(), use_cache=False)
    for hook in hooks:
        hook.remove()
    keeps = []
    for layer in pruned.layers:
        x, interaction = hidden[layer.name].double(), layer.interaction.double()
        with torch.no_grad():
            args = (interaction.query(x), interaction.key(x), interaction.beta)
            keeps.append(
                oracle.hard_keep(*args, real=real)
                if alpha is None
                else oracle.soft_keep(*args, alpha, real)
            )
        layer.interaction.float()
    return keeps


def test_public_names(model):
    pruned = kvprune.attach(model, PruningConfig(rank=16, beta=2.0))
    assert isinstance(pruned.interactions, torch.nn.ModuleList)
    assert len(pruned.interactions) == 3
    for interaction in pruned.interactions:
        assert interaction.query.weight.shape == interaction.key.weight.shape == (16, 64)
        assert interaction.query.bias is None
        assert isinstance(interaction.beta, torch.nn.Parameter)
        assert interaction.beta.item() == 2.0
    pruned.alpha = 4.0
    assert pruned.alpha == 4.0
    ids = random_ids(2, 20)
    model.train()
    model(ids)
    assert pruned.sparsity_loss().requires_grad
    assert pruned.sparsity().per_layer.shape == (3,)
    assert pruned.trace(ids).shape == (3, 2, 20)
    assert pruned.detach() is model


def test_initial_weights():
    torch.manual_seed(0)
    model = zoo.make("llama", hidden_size=256, num_attention_heads=4, head_dim=16)
    weight = kvprune.attach(model, PruningConfig(rank=128)).interactions[0].query.weight
    assert_close(weight.std(), torch.tensor(256**-0.5), rtol=0.02, atol=0)


def test_interactions_are_parameters_of_the_model(model, pruned):
    ids = {id(p) for p in model.parameters()}
    assert all(id(p) in ids for p in pruned.interactions.parameters())
    model.to(torch.float64)
    assert pruned.interactions[0].beta.dtype == torch.float64


def test_sparsity_loss_equals_the_paper(model, pruned):
    ids = random_ids(2, 24)
    pruned.hard = False
    keeps = oracle_keeps(pruned, ids, alpha=1.5)
    model.train()
    pruned.hard = None
    model(ids)
    want = oracle.sparsity_loss(keeps)
    assert_close(pruned.sparsity_loss().double(), want, atol=1e-5, rtol=0)
    n, L = 24, 3
    total = sum(k[0].tril(-1).sum() + k[1].tril(-1).sum() for k in keeps)
    assert_close(want, 2 / (L * n * (n - 1)) * total / 2)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_sparsity_and_trace_against_the_oracle(model, pruned, padding):
    ids, real = random_ids(2, 40), real_tokens(2, 40, padding)
    keeps = oracle_keeps(pruned, ids, real)
    sparsity = pruned.sparsity()
    want = torch.tensor(oracle.sparsity(keeps, real))
    assert_close(sparsity.per_layer, want.float(), atol=1e-6, rtol=0)
    assert sparsity.total == pytest.approx(float(want.mean()))
    assert float(sparsity) == sparsity.total
    assert 0.1 < sparsity.total < 0.95
    steps = pruned.trace(ids, None if real is None else real.long())
    pairs = real_pairs(real, 2, 40)
    for layer, keep in enumerate(keeps):
        assert torch.equal(visible(steps[layer]) & pairs, keep.bool() & pairs)
    assert set(steps[steps > 39].tolist()) <= {NEVER}


def test_trace_does_not_change_the_model(model, pruned):
    model.train()
    model.model.layers[1].eval()
    pruned.trace(random_ids(1, 12))
    assert model.training
    assert not model.model.layers[1].training
    assert pruned.hard is None
    assert torch.equal(pruned.trace([5, 6, 7]), pruned.trace(torch.tensor([[5, 6, 7]])))


def test_training_mode_selects_the_gate(model, pruned):
    ids = random_ids(1, 30)
    with torch.no_grad():
        hard = model(ids).logits
        model.train()
        soft = model(ids).logits
        pruned.hard = True
        assert torch.equal(model(ids).logits, hard)
        pruned.hard = None
        pruned.alpha = float("inf")
        assert torch.equal(model(ids).logits, hard)
        pruned.alpha = 1.5
        model.eval()
        pruned.hard = False
        assert torch.equal(model(ids).logits, soft)
    assert (hard - soft).abs().max() > 0.1


def test_depth_tied(model):
    pruned = attach_uneven(model, alpha=1.5, depth_tied=True)
    ids = random_ids(2, 40)
    steps = pruned.trace(ids)
    assert (steps[1:] <= steps[:-1]).all()
    assert (steps[1:] < steps[:-1]).any()
    keeps = oracle.depth_tied(oracle_keeps(pruned, ids))
    model.eval()(ids)
    assert_close(
        pruned.sparsity().per_layer.double(), torch.tensor(oracle.sparsity(keeps)).double(),
        atol=1e-6, rtol=0,
    )  # fmt: skip
    pruned.hard = False
    keeps = oracle.depth_tied(oracle_keeps(pruned, ids, alpha=1.5))
    assert_close(1 - pruned.sparsity().total, float(oracle.sparsity_loss(keeps)), atol=1e-5, rtol=0)


def test_protected_tokens_and_threshold(model):
    def steps(**options):
        with kvprune.attach(model, PruningConfig(rank=8, **options)) as pruned:
            uneven_gates(pruned)
            return pruned.trace(random_ids(2, 40))

    plain = steps()
    assert (steps(protect_first=3)[..., :3] == NEVER).all()
    assert (plain[..., :3] < NEVER).any()
    distance = steps(protect_recent=5) - torch.arange(40)
    assert int(distance.min()) == 6
    assert int((plain - torch.arange(40)).min()) == 1
    shares = [(steps(threshold=t) < NEVER).float().mean() for t in (-2.0, 0.0, 2.0)]
    assert shares[0] < shares[1] < shares[2]


@pytest.mark.parametrize(
    "change", [{"threshold": 1.0}, {"protect_recent": 7}, {"protect_first": 3, "threshold": -1.0}]
)
def test_adjust_equals_attaching_with_the_new_settings(change):
    ids = random_ids(2, 30)
    pruned = attach_uneven(zoo.make("llama"))
    before = pruned.trace(ids)
    pruned.adjust(**change)
    got, logits = pruned.trace(ids), pruned.model(ids).logits
    state = pruned.interactions.state_dict()
    pruned.detach()
    reattached = kvprune.attach(pruned.model, PruningConfig(rank=8, **change))
    reattached.interactions.load_state_dict(state)
    assert torch.equal(got, reattached.trace(ids))
    assert not torch.equal(got, before)
    assert_close(logits, reattached.model(ids).logits)


def test_adjust_refuses_other_settings():
    pruned = kvprune.attach(zoo.make("gpt2"), PruningConfig(rank=8))
    with pytest.raises(PruneError, match="rank cannot be changed while attached, only threshold"):
        pruned.adjust(rank=4)
    with pytest.raises(PruneError, match="protect_first=-1"):
        pruned.adjust(protect_first=-1)
    with pruned.dense(), pytest.raises(PruneError, match="dense attention has nothing to adjust"):
        pruned.adjust(threshold=1.0)
    assert pruned.config == PruningConfig(rank=8)


def test_copy_of_an_attached_model_is_independent(model, pruned):
    model.train()
    ids = random_ids(2, 20)
    model(ids, labels=ids).loss.backward()
    clone = copy.deepcopy(model).eval()
    want = clone(ids).logits
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(clone(ids).logits, want)


def test_models_that_share_the_config_do_not_change():
    first = zoo.make("gpt2")
    second = type(first)(first.config).eval()
    kvprune.attach(first)
    assert second.config._attn_implementation == "sdpa"
    second(random_ids(1, 8))


def test_attached_model_is_saved_without_pruning(model, pruned, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert "kvprune" not in (tmp_path / "config.json").read_text()


def test_sparsity_loss_has_a_gradient_without_checkpointing(model, pruned):
    model.train()
    model(random_ids(2, 16), use_cache=False)
    assert pruned.sparsity_loss().requires_grad


def test_reentrant_checkpointing_is_refused(model, pruned):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(random_ids(2, 16), use_cache=False)
    with pytest.raises(PruneError, match="use_reentrant"):
        pruned.sparsity_loss()
    with torch.no_grad():
        assert 0 < pruned.sparsity_loss() < 1


def test_attaching_twice_is_refused(model, pruned):
    with pytest.raises(PruneError, match="attached already"):
        kvprune.attach(model)
    pruned.detach()
    kvprune.attach(model).detach()


def test_detaching_twice_is_harmless(model, pruned):
    pruned.detach()
    pruned.detach()
    assert not hasattr(model.model.layers[0].self_attn, "interaction")


def test_sparsity_before_a_forward_pass_is_refused(pruned):
    with pytest.raises(PruneError, match="not run yet"):
        pruned.sparsity()
    with pytest.raises(PruneError, match="no training pass"):
        pruned.sparsity_loss()


def test_changing_the_attention_while_attached_is_refused(model, pruned):
    model.set_attn_implementation("eager")
    with pytest.raises(PruneError, match="after attach"):
        model(random_ids(1, 8))


def test_nan_in_weights_is_refused(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(PruneError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        kvprune.attach(model)


def test_unsupported_masks_are_refused(model, pruned):
    ids = random_ids(1, 8)
    with pytest.raises(PruneError, match="4-D"):
        model(ids, attention_mask=torch.zeros(1, 1, 8, 8))
    with pytest.raises(PruneError, match="packed"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), use_cache=False)


def test_other_objects_are_refused():
    with pytest.raises(PruneError, match="Linear is not a transformers model"):
        kvprune.attach(torch.nn.Linear(2, 2))
    with pytest.raises(PruneError, match="not a configuration"):
        kvprune.attach(zoo.make("gpt2"), {"rank": 4})


def test_invalid_alpha_is_refused(pruned):
    for bad in (0.5, float("nan"), "4"):
        with pytest.raises(PruneError, match="alpha"):
            pruned.alpha = bad


def test_single_token(model, pruned):
    for mode in (model.eval, model.train):
        mode()
        model(random_ids(2, 1))
        assert pruned.sparsity().total == 0
    assert pruned.sparsity_loss().isfinite()
