"""The controller of γ: against a simulated model, and in a real small run."""

import math
import random

import pytest

from kvprune.train.gamma import MAX_GAMMA, MIN_GAMMA, GammaState, log_odds, next_state
from training_runs import logged, make_trainer


def simulate(target, slope, center, lag, updates, start=0.0, noise=0.005):
    """A model whose log-odds of sparsity follow slope · (log γ − center), ever more slowly."""
    draws = random.Random(0)
    state, sparsity, most = GammaState(0.3), start, 0.0
    for i in range(1, updates + 1):
        settled = 1 / (1 + math.exp(-slope * (math.log(state.gamma) - center)))
        slower = lag * (1 + 2 * (i / updates) ** 2)
        sparsity += (settled - sparsity) * (1 - math.exp(-1 / (updates * slower)))
        most = max(most, sparsity)
        state = next_state(state, sparsity + draws.gauss(0, noise), target, i / updates)
    return sparsity, most


@pytest.mark.parametrize("target", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("slope", [0.4, 0.55, 0.9])
@pytest.mark.parametrize("center", [-4.0, -2.6, -1.0])
@pytest.mark.parametrize(("lag", "updates"), [(0.1, 20), (0.1, 100), (0.03, 100), (0.01, 1000)])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_settles_on_the_target(target, slope, center, lag, updates, start):
    end, most = simulate(target, slope, center, lag, updates, start)
    assert end == pytest.approx(target, abs=0.04)
    # where γ starts too high, the sparsity first follows it
    initial = 1 / (1 + math.exp(-slope * (math.log(0.3) - center)))
    assert most < max(target, start, initial) + 0.06


def test_gamma_rises_below_the_target_and_falls_above():
    state = GammaState(0.3, start=0.5, progress=0.5)
    assert next_state(state, 0.5, 0.8, 0.51).gamma > 0.3
    assert next_state(state, 0.9, 0.8, 0.51).gamma < 0.3
    settled = GammaState(0.3, start=0.5, progress=0.5, error=0.0)
    assert next_state(settled, 0.8, 0.8, 0.51).gamma == pytest.approx(0.3)


def test_set_point_starts_at_the_first_measurement():
    state = next_state(GammaState(0.3), 0.55, 0.8, 0.01)
    assert state.start == 0.55
    assert abs(state.error) < 0.05
    assert next_state(state, 0.7, 0.8, 0.02).start == 0.55


def test_gamma_recovers_from_its_limits():
    state = GammaState(0.3)
    for i in range(1, 101):
        state = next_state(state, 0.0, 0.9, i / 200)
    assert state.gamma == MAX_GAMMA
    for i in range(101, 121):
        state = next_state(state, 1.0, 0.9, i / 200)
    assert state.gamma < MAX_GAMMA / 10
    for i in range(121, 201):
        state = next_state(state, 1.0, 0.9, i / 200)
    assert state.gamma == MIN_GAMMA
    assert math.isfinite(log_odds(0.0))
    assert math.isfinite(log_odds(1.0))


@pytest.mark.parametrize("target", [0.5, 0.8])
def test_real_run_ends_at_the_target(tmp_path, target):
    trainer = make_trainer(
        tmp_path, target_sparsity=target, steps=80, probe_every=2, probe_rows=6, distill=1.0,
        eval_every=1000, save_every=1000, interaction_lr=5e-3, log_every=10,
    )  # fmt: skip
    trainer.train()
    assert trainer.evaluate()["eval_sparsity_hard"] == pytest.approx(target, abs=0.05)
    assert logged(trainer, "gamma")[-1] != 0.3
