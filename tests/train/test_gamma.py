"""The controller of γ: against a simulated model, and in a real small run."""

import math
import random

import pytest

from kvprune.train.gamma import MAX_GAMMA, MIN_GAMMA, GammaState, log_odds, next_state
from training_runs import logged, make_trainer

EVERY = 10  # steps between two measurements


def simulate(target, slope, center, lag, updates, start=0.0, noise=0.005):
    """A model whose log-odds of sparsity follow slope · (log γ − center), ever more slowly."""
    draws = random.Random(0)
    state, sparsity, most = GammaState(0.3), start, 0.0
    for i in range(1, updates + 1):
        settled = 1 / (1 + math.exp(-slope * (math.log(state.gamma) - center)))
        slower = lag * (1 + 2 * (i / updates) ** 2)
        sparsity += (settled - sparsity) * (1 - math.exp(-1 / (updates * slower)))
        most = max(most, sparsity)
        measured = sparsity + draws.gauss(0, noise)
        state = next_state(state, measured, target, i / updates, EVERY * i)
    return sparsity, most


@pytest.mark.parametrize("target", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("slope", [0.4, 0.55, 0.9])
@pytest.mark.parametrize("center", [-4.0, -2.6, -1.0])
@pytest.mark.parametrize(("lag", "updates"), [(0.1, 20), (0.1, 100), (0.03, 100), (0.01, 1000)])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_settles_on_the_target(target, slope, center, lag, updates, start):
    end, most = simulate(target, slope, center, lag, updates, start)
    # what the largest γ leads to, if it is held
    reachable = 1 / (1 + math.exp(-slope * (math.log(MAX_GAMMA) - center)))
    assert end == pytest.approx(min(target, reachable), abs=0.04)
    # where γ starts too high, the sparsity first follows it
    initial = 1 / (1 + math.exp(-slope * (math.log(0.3) - center)))
    assert most < max(target, start, initial) + 0.06


def test_gamma_rises_below_the_target_and_falls_above():
    state = GammaState(0.3, start=0.5, progress=0.5)
    assert next_state(state, 0.5, 0.8, 0.51, 10).gamma > 0.3
    assert next_state(state, 0.9, 0.8, 0.51, 10).gamma < 0.3
    settled = GammaState(0.3, start=0.5, progress=0.5, error=0.0)
    assert next_state(settled, 0.8, 0.8, 0.51, 10).gamma == pytest.approx(0.3)


def test_set_point_starts_at_the_first_measurement():
    state = next_state(GammaState(0.3), 0.55, 0.8, 0.01, 10)
    assert state.start == 0.55
    assert abs(state.error) < 0.05
    assert next_state(state, 0.7, 0.8, 0.02, 20).start == 0.55


def test_gamma_recovers_from_its_limits():
    state = GammaState(0.3)
    for i in range(1, 101):
        state = next_state(state, 0.0, 0.9, i / 200, 10 * i)
    assert state.gamma == MAX_GAMMA
    for i in range(101, 121):
        state = next_state(state, 1.0, 0.9, i / 200, 10 * i)
    assert state.gamma < MAX_GAMMA / 10
    for i in range(121, 201):
        state = next_state(state, 1.0, 0.9, i / 200, 10 * i)
    assert state.gamma == MIN_GAMMA
    assert math.isfinite(log_odds(0.0))
    assert math.isfinite(log_odds(1.0))


@pytest.mark.parametrize("steps", [4, 10, 20])
@pytest.mark.parametrize("every", [1, 2])
def test_short_run_cannot_run_away(steps, every):
    """Gates that do not respond at all: γ rises with the steps taken, not with the share done."""
    state = GammaState(0.3)
    for step in range(every, steps + 1, every):
        before, state = state, next_state(state, 0.05, 0.7, step / steps, step)
        assert state.gamma / before.gamma <= math.exp(0.3 * every) + 1e-9
    assert 0.3 < state.gamma <= min(0.3 * math.exp(0.3 * steps), MAX_GAMMA) * (1 + 1e-9)


def test_long_run_is_bounded_by_its_share_alone():
    """Of 2,000 steps, ten are a share of 0.005: log γ may change by 0.3, as it always could."""
    state = GammaState(0.3, start=0.0, progress=0.5, step=1000)
    after = next_state(state, 0.02, 0.95, 0.505, 1010)
    assert after.gamma == pytest.approx(0.3 * math.exp(60 * 0.005))


def test_gamma_that_starts_above_the_limit_is_kept():
    state = GammaState(2 * MAX_GAMMA, start=0.1, progress=0.5, step=100)
    assert next_state(state, 0.1, 0.8, 0.55, 110).gamma == 2 * MAX_GAMMA
    assert next_state(state, 0.9, 0.8, 0.55, 110).gamma < 2 * MAX_GAMMA


@pytest.mark.parametrize("target", [0.5, 0.8])
def test_real_run_ends_at_the_target(tmp_path, target):
    trainer = make_trainer(
        tmp_path, target_sparsity=target, steps=80, probe_every=2, probe_rows=6, distill=1.0,
        eval_every=1000, save_every=1000, interaction_lr=5e-3, log_every=10,
    )  # fmt: skip
    trainer.train()
    assert trainer.evaluate()["eval_sparsity_hard"] == pytest.approx(target, abs=0.05)
    assert logged(trainer, "gamma")[-1] != 0.3


def test_real_short_run_stays_bounded(tmp_path):
    """Six steps at a rate too small to prune: γ asks for more, step by step."""
    trainer = make_trainer(
        tmp_path, target_sparsity=0.9, steps=6, probe_every=1, interaction_lr=1e-5
    )
    trainer.train()
    gammas = logged(trainer, "gamma")
    assert 0.3 < gammas[-1] <= 0.3 * math.exp(0.3 * 6) * (1 + 1e-9)
