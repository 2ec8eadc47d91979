"""The settings of the learned method."""

import math

from kvprune import PruningConfig
from kvprune.methods.learned import saturation


def test_saturation_is_where_a_vote_is_one():
    import torch

    from kvprune import alpha_sigmoid

    for alpha in (1.5, 2.0, 4.0):
        x = torch.tensor([saturation(alpha) - 1e-3, saturation(alpha)])
        below, at = alpha_sigmoid(x, alpha).tolist()
        assert below < at == 1
    assert saturation(1) == math.inf


def test_advice():
    assert PruningConfig(beta=2.0).start_advice(1.5) == ""
    assert "broken" in PruningConfig(beta=2.0).start_advice(1.0)
    assert "α = 1.5" in PruningConfig(beta=2.0).start_advice(1.0)
    assert "gradient" in PruningConfig(beta=2.0).start_advice(2.5)
    assert PruningConfig(beta=2.0, gate="temperature").start_advice(8.0) == ""
