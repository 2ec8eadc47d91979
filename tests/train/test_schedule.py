"""α as a function of progress, and the advice on where to start."""

import itertools
import math

import pytest

from kvprune import PruneError, PruningConfig
from kvprune.train.schedule import advice, alpha_at, saturation


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_from_start_to_end(shape):
    path = [alpha_at(i / 100, 1.0, 8.0, shape) for i in range(101)]
    assert path[0] == 1.0
    assert path[-1] == pytest.approx(8.0)
    assert path[50] == pytest.approx(4.5)
    assert all(a < b for a, b in itertools.pairwise(path))


def test_cosine_is_slow_at_both_ends():
    assert alpha_at(0.1, 0, 1) == pytest.approx((1 - math.cos(0.1 * math.pi)) / 2)
    assert alpha_at(0.1, 1, 8) - 1 < 0.03 * 7
    assert alpha_at(0.1, 1, 8, "linear") == pytest.approx(1.7)


def test_outside_and_constant():
    assert alpha_at(-1, 1, 8) == 1
    assert alpha_at(2, 1, 8) == 8
    assert {alpha_at(i / 7, 1, 8, "constant") for i in range(8)} == {8}
    with pytest.raises(PruneError, match="'step' is unknown"):
        alpha_at(0, 1, 8, "step")


def test_saturation_is_where_a_vote_is_one():
    import torch

    from kvprune import alpha_sigmoid

    for alpha in (1.5, 2.0, 4.0):
        x = torch.tensor([saturation(alpha) - 1e-3, saturation(alpha)])
        below, at = alpha_sigmoid(x, alpha).tolist()
        assert below < at == 1
    assert saturation(1) == math.inf


def test_advice():
    assert advice(1.5, PruningConfig(beta=2.0)) == ""
    assert "broken" in advice(1.0, PruningConfig(beta=2.0))
    assert "α = 1.5" in advice(1.0, PruningConfig(beta=2.0))
    assert "gradient" in advice(2.5, PruningConfig(beta=2.0))
    assert advice(8.0, PruningConfig(beta=2.0, gate="temperature")) == ""
