"""The configurations of all methods by their public names; methods/ has one file for each."""

from kvprune.methods import METHODS as METHODS
from kvprune.methods import method_from_dict as from_dict
from kvprune.methods.base import Method as Config
from kvprune.methods.dense import DenseConfig as DenseConfig
from kvprune.methods.h2o import H2OConfig as H2OConfig
from kvprune.methods.keynorm import KeyNormConfig as KeyNormConfig
from kvprune.methods.learned import PruningConfig as PruningConfig
from kvprune.methods.learned import check_alpha as check_alpha
from kvprune.methods.local import LocalConfig as LocalConfig
from kvprune.methods.snapkv import SnapKVConfig as SnapKVConfig
from kvprune.methods.streaming import StreamingConfig as StreamingConfig
from kvprune.methods.strided import StridedConfig as StridedConfig
from kvprune.methods.tova import TovaConfig as TovaConfig

__all__ = [
    "METHODS",
    "Config",
    "DenseConfig",
    "H2OConfig",
    "KeyNormConfig",
    "LocalConfig",
    "PruningConfig",
    "SnapKVConfig",
    "StreamingConfig",
    "StridedConfig",
    "TovaConfig",
    "check_alpha",
    "from_dict",
    "to_dict",
]


def to_dict(config: Config) -> dict[str, object]:
    return config.to_dict()
