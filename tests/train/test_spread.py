"""Whether a layer learns to vote must not depend on the scale of its inputs."""

import pytest
import torch
from torch.testing import assert_close

import kvprune
from kvprune import PruningConfig
from kvprune.train import spread
from training_runs import logged, make_trainer, small_model


def shrunken(by: float, layer: int = 0):
    """As small_model(), with another scale between a norm and its projections."""
    model = small_model()
    block = model.transformer.h[layer]
    with torch.no_grad():
        for parameter in (block.ln_1.weight, block.ln_1.bias):
            parameter.mul_(by)
        block.attn.c_attn.weight.div_(by)
    return model


def trained(tmp_path, model, **settings):
    # clipping uses the norm over all layers, which depends on their scales
    defaults = {"tune": "interaction", "gamma": 1.0, "steps": 4, "max_grad_norm": 0.0}
    trainer = make_trainer(tmp_path, model=model, **defaults, **settings)
    trainer.train()
    return trainer


def test_factors_follow_the_inputs():
    sizes = []
    model = small_model()
    for block in model.transformer.h:
        hook = lambda module, args, out: sizes.append(float(out.pow(2).mean().sqrt()))  # noqa: E731
        block.ln_1.register_forward_hook(hook)
    pruned = kvprune.attach(model, PruningConfig(rank=8))
    factors = spread.factors(pruned)
    assert_close(factors, spread.USUAL / torch.tensor(sizes))
    small = spread.factors(kvprune.attach(shrunken(0.01), PruningConfig(rank=8)))
    assert_close(small / factors, torch.tensor([100.0, 1.0]), rtol=1e-3, atol=0)


def test_training_does_not_depend_on_the_scale(tmp_path):
    plain = trained(tmp_path / "plain", small_model())
    small = trained(tmp_path / "small", shrunken(0.01))
    for name in ("loss", "sparsity_soft", "sparsity_soft_layer_0"):
        assert logged(small, name) == pytest.approx(logged(plain, name), rel=5e-3)
    # without the factors it does
    off = [trained(tmp_path / f"{by}", shrunken(by), spread=False) for by in (1.0, 0.01)]
    one, other = (logged(trainer, "sparsity_soft_layer_0") for trainer in off)
    assert one != pytest.approx(other, rel=0.05)


def test_weights_and_rates_are_scaled(tmp_path):
    trainer = make_trainer(tmp_path / "on", model=shrunken(0.01), interaction_lr=0.02, steps=1)
    plain = make_trainer(tmp_path / "off", model=shrunken(0.01), steps=1, spread=False)
    factors = trainer.rate_factors
    assert factors[0] > 20 * factors[1]
    for scaled, unscaled, factor in zip(
        trainer.pruned.interactions, plain.pruned.interactions, factors, strict=True
    ):
        assert_close(scaled.query.weight, unscaled.query.weight * factor)
        assert_close(scaled.key.weight, unscaled.key.weight * factor)
        assert_close(scaled.beta, unscaled.beta)
    trainer.train()
    rates = {group["name"]: group["initial_lr"] for group in trainer.optimizer.param_groups}
    assert rates["interaction"] == 0.02
    for number, factor in enumerate(factors.tolist()):
        assert rates[f"interaction_layer_{number}"] == pytest.approx(0.02 * factor)
    assert rates["base"] == 1e-3


def test_continuing_keeps_the_weights(tmp_path):
    pruned = kvprune.attach(small_model(), PruningConfig(rank=8))
    before = {name: x.clone() for name, x in pruned.interactions.state_dict().items()}
    make_trainer(tmp_path, model=pruned, steps=1)
    assert_close(pruned.interactions.state_dict(), before, atol=0, rtol=0)


def test_zero_inputs_have_no_factor(caplog):
    model = small_model()
    with torch.no_grad():
        model.transformer.h[0].ln_1.weight.zero_()
        model.transformer.h[0].ln_1.bias.zero_()
    factors = spread.factors(kvprune.attach(model, PruningConfig(rank=8)))
    assert factors[0] == 1.0
    assert "layers [0] have no size" in caplog.text
