"""α as a function of progress."""

import itertools
import math

import pytest

from kvprune import PruneError
from kvprune.train.alpha import alpha_at


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


def test_out_of_range_and_constant():
    assert alpha_at(-1, 1, 8) == 1
    assert alpha_at(2, 1, 8) == 8
    assert {alpha_at(i / 7, 1, 8, "constant") for i in range(8)} == {8}
    with pytest.raises(PruneError, match="'step' is unknown"):
        alpha_at(0, 1, 8, "step")
