"""Configurations: validated when created, unchanged by a round trip."""

import math

import pytest

from kvprune import DenseConfig, LocalConfig, PruneError, PruningConfig, StridedConfig
from kvprune.config import from_dict, to_dict


@pytest.mark.parametrize(
    "config",
    [
        PruningConfig(),
        PruningConfig(rank=8, gate="temperature", depth_tied=True, threshold=-0.5),
        DenseConfig(),
        LocalConfig(window=3),
        StridedConfig(stride=3),
    ],
)
def test_round_trip(config):
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": 2.5}, "rank=2.5"),
        ({"rank": True}, "rank=True"),
        ({"beta": math.nan}, "beta=nan"),
        ({"threshold": "low"}, "threshold='low'"),
        ({"alpha": 0.9}, "alpha=0.9"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"protect_first": -1}, "protect_first=-1"),
        ({"protect_recent": -2}, "protect_recent=-2"),
        ({"gate": "relu"}, "gate='relu'"),
    ],
)
def test_invalid_values_are_refused(values, message):
    with pytest.raises(PruneError, match=message):
        PruningConfig(**values)


def test_invalid_baselines_are_refused():
    with pytest.raises(PruneError, match="window=0"):
        LocalConfig(window=0)
    with pytest.raises(PruneError, match="stride=-1"):
        StridedConfig(stride=-1)
    with pytest.raises(PruneError, match="'sparse' is unknown"):
        from_dict({"method": "sparse"})
