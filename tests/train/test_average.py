"""The mean of weights over steps: against plain sums, in evaluation, checkpoints and the result."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import kvprune
from kvprune import PruneError
from kvprune.train.average import WeightAverage
from training_runs import make_trainer, small_model, weights


def follow(values, window):
    """The mean that WeightAverage ends with when a single weight takes these values."""
    model = nn.Linear(1, 1, bias=False)
    average = WeightAverage(SimpleNamespace(model=model), window)
    for value in values:
        model.weight.data.fill_(value)
        average.on_step_end()
    return float(average.mean["weight"])


def test_mean_over_steps():
    values = [3.0, 5.0, 10.0, -2.0]
    assert follow(values, window=10) == pytest.approx(4.0)
    want = 4.0  # of the first two
    for value in values[2:]:
        want += (value - want) / 2
    assert follow(values, window=2) == pytest.approx(want)
    assert follow(values, window=1) == -2.0


def trained(folder, **settings):
    """A run and what its weights were after each step; its mean is over all of them."""
    trainer = make_trainer(folder, steps=6, average=50, save_every=2, eval_every=2, **settings)
    seen = []
    update = trainer.average.on_step_end

    def watch(*args, **kwargs):
        seen.append({n: w for n, w in weights(trainer).items() if n in trained_names(trainer)})
        return update(*args, **kwargs)

    trainer.average.on_step_end = watch
    return trainer, seen


def trained_names(trainer):
    return {name for name, p in trainer.pruned.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("tune", ["all", "lora"])
def test_result_is_the_mean(tmp_path, tune):
    trainer, seen = trained(tmp_path, tune=tune)
    trainer.train()
    after = weights(trainer)
    assert len(seen) == 6
    for name in seen[-1]:
        mean = sum(step[name] for step in seen) / len(seen)
        assert_close(after[name], mean, rtol=1e-4, atol=1e-6)
    moved = [name for name, last in seen[-1].items() if not torch.equal(after[name], last)]
    assert moved


def test_checkpoint_has_the_mean_as_an_adapter(tmp_path):
    trainer, seen = trained(tmp_path, tune="lora")
    trainer.train()
    pruned = kvprune.load(small_model(), tmp_path / "checkpoint-4/mean")
    loaded = dict(pruned.model.named_parameters())
    for name in seen[0]:
        mean = sum(step[name] for step in seen[:4]) / 4
        assert_close(loaded[name].data, mean, rtol=1e-4, atol=1e-6)


def test_evaluation_uses_the_mean_and_leaves_the_weights(tmp_path):
    trainer, _ = trained(tmp_path)
    during = {}
    count = trainer.evaluation.add

    def watch(*args):
        during.update(weights(trainer))
        return count(*args)

    trainer.evaluation.add = watch
    trainer.train()
    # the last evaluation was of the mean after all steps, which is also the result
    for name, weight in weights(trainer).items():
        assert_close(during[name], weight, rtol=0, atol=0)


def test_resumed_run_has_the_same_mean(tmp_path):
    whole, _ = trained(tmp_path / "whole")
    whole.train()
    first, _ = trained(tmp_path / "parts")
    first.train()
    again = make_trainer(tmp_path / "parts", steps=6, average=50, save_every=2, eval_every=2)
    again.train(resume_from_checkpoint=str(tmp_path / "parts/checkpoint-4"))
    assert again.average.steps == 6
    for name, weight in weights(whole).items():
        assert_close(weights(again)[name], weight, rtol=1e-5, atol=1e-7)


def test_checkpoint_without_a_mean_is_refused(tmp_path):
    make_trainer(tmp_path, steps=2, save_every=2).train()
    trainer = make_trainer(tmp_path, steps=4, average=10)
    with pytest.raises(PruneError, match="has no mean of weights"):
        trainer.train(resume_from_checkpoint=True)
