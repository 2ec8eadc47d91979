"""Bytes and FLOPs of a kernel, and the time that a GPU needs for them at best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """What a data sheet promises; kernels reach 60 to 90 % of it."""

    name: str
    bandwidth: float  # bytes/s, of memory
    cache: float  # bytes/s, read from the second-level cache
    tensor: float  # FLOP/s, products of bfloat16 matrices
    tf32: float  # FLOP/s, products of float32 matrices with 10 bits of mantissa
    scalar: float  # FLOP/s, float32 outside of the tensor cores


# the cache: 5,120 bytes per cycle, which NVIDIA says of the A100; of the H100 it is an assumption
A100_40 = Gpu("A100 40 GB", 1.555e12, 7.2e12, 312e12, 156e12, 19.5e12)
A100 = Gpu("A100 80 GB", 2.039e12, 7.2e12, 312e12, 156e12, 19.5e12)
H100 = Gpu("H100 SXM", 3.35e12, 9.0e12, 989e12, 495e12, 67e12)
GPUS = (A100_40, A100, H100)

# Seconds that one more kernel takes however little it does: inside of a CUDA graph, and when
# Python launches it. Assumed; benchmarks/gpu.py measures both.
LAUNCHES = {"in a CUDA graph": 2e-6, "from Python": 8e-6}


@dataclass(frozen=True)
class Work:
    """What one kernel, or several in a row, must do."""

    bytes: float  # of memory, each read once
    tensor: float = 0.0  # FLOPs of bfloat16 products
    scores: float = 0.0  # FLOPs of the products of votes, which stay float32
    scalar: float = 0.0  # float32 operations on single numbers
    cached: float = 0.0  # bytes that blocks of threads read again, from the second-level cache
    launches: int = 1

    @property
    def flops(self) -> float:
        return self.tensor + self.scores + self.scalar

    @property
    def intensity(self) -> float:
        """FLOPs per byte: below the GPU's own ratio, memory decides."""
        return self.flops / self.bytes

    def bound(self, gpu: Gpu, exact: bool = True) -> tuple[float, str]:
        """Seconds without launches, and what they are spent on; all units work at once.

        exact: votes are plain float32 products, outside of the tensor cores; else three tf32
        products each, which are as exact to a few units in the last place.
        """
        scalar = self.scalar + (self.scores if exact else 0.0)
        times = {
            "memory": self.bytes / gpu.bandwidth,
            "cache": self.cached / gpu.cache,
            "products": self.tensor / gpu.tensor + (0.0 if exact else 3 * self.scores / gpu.tf32),
            "float32": scalar / gpu.scalar,
        }
        limit = max(times, key=lambda name: times[name])
        return times[limit], limit

    def seconds(self, gpu: Gpu, launch: float = 0.0, exact: bool = True) -> float:
        return self.bound(gpu, exact)[0] + self.launches * launch


def seconds(works: Iterable[Work], gpu: Gpu, launch: float = 0.0, exact: bool = True) -> float:
    """Of kernels one after the other."""
    return sum(work.seconds(gpu, launch, exact) for work in works)
