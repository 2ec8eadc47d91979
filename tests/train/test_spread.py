"""How a layer scales its inputs must not decide whether it can learn to vote."""

import pytest
import torch
from torch.testing import assert_close

import kvprune
import training_runs as runs
from kvprune import PruningConfig
from kvprune.train import spread


def shrunken(by: float, layer: int = 0):
    """The same function as runs.model(), but for the scale between a norm and its projections."""
    model = runs.model()
    block = model.transformer.h[layer]
    with torch.no_grad():
        for parameter in (block.ln_1.weight, block.ln_1.bias):
            parameter.mul_(by)
        block.attn.c_attn.weight.div_(by)
    return model


def history(tmp_path, model, **settings):
    # clipping takes the norm over all layers, and so does see their scales
    usual = {"tune": "interaction", "gamma": 1.0, "steps": 4, "max_grad_norm": 0.0}
    made = runs.trainer(tmp_path, of=model, **usual, **settings)
    made.train()
    return made


def test_factors_follow_the_inputs():
    sizes = []
    model = runs.model()
    for block in model.transformer.h:
        hook = lambda module, args, out: sizes.append(float(out.pow(2).mean().sqrt()))  # noqa: E731
        block.ln_1.register_forward_hook(hook)
    pruned = kvprune.attach(model, PruningConfig(rank=8))
    found = spread.factors(pruned)
    assert_close(found, spread.USUAL / torch.tensor(sizes))
    small = spread.factors(kvprune.attach(shrunken(0.01), PruningConfig(rank=8)))
    assert_close(small / found, torch.tensor([100.0, 1.0]), rtol=1e-3, atol=0)


def test_training_does_not_see_the_scale(tmp_path):
    plain = history(tmp_path / "plain", runs.model())
    small = history(tmp_path / "small", shrunken(0.01))
    for name in ("loss", "sparsity_soft", "sparsity_soft_layer_0"):
        assert runs.losses(small, name) == pytest.approx(runs.losses(plain, name), rel=5e-3)
    # and without the factors it does
    off = [history(tmp_path / f"{by}", shrunken(by), spread=False) for by in (1.0, 0.01)]
    one, other = (runs.losses(made, "sparsity_soft_layer_0") for made in off)
    assert one != pytest.approx(other, rel=0.05)


def test_weights_and_rates_have_the_factor(tmp_path):
    made = runs.trainer(tmp_path / "on", of=shrunken(0.01), interaction_lr=0.02, steps=1)
    plain = runs.trainer(tmp_path / "off", of=shrunken(0.01), steps=1, spread=False)
    factors = made.rate_factors
    assert factors[0] > 20 * factors[1]
    for ours, theirs, factor in zip(
        made.pruned.interactions, plain.pruned.interactions, factors, strict=True
    ):
        assert_close(ours.query.weight, theirs.query.weight * factor)
        assert_close(ours.key.weight, theirs.key.weight * factor)
        assert_close(ours.beta, theirs.beta)
    made.train()
    rates = {group["name"]: group["initial_lr"] for group in made.optimizer.param_groups}
    assert rates["interaction"] == 0.02
    for number, factor in enumerate(factors.tolist()):
        assert rates[f"interaction_layer_{number}"] == pytest.approx(0.02 * factor)
    assert rates["base"] == 1e-3


def test_going_on_leaves_the_weights(tmp_path):
    pruned = kvprune.attach(runs.model(), PruningConfig(rank=8))
    before = {name: x.clone() for name, x in pruned.interactions.state_dict().items()}
    runs.trainer(tmp_path, of=pruned, steps=1)
    assert_close(pruned.interactions.state_dict(), before, atol=0, rtol=0)


def test_no_size_is_no_factor(caplog):
    model = runs.model()
    with torch.no_grad():
        model.transformer.h[0].ln_1.weight.zero_()
        model.transformer.h[0].ln_1.bias.zero_()
    found = spread.factors(kvprune.attach(model, PruningConfig(rank=8)))
    assert found[0] == 1.0
    assert "layers [0] have no size" in caplog.text
