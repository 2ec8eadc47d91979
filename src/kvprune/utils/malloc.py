"""Keep freed memory in the process: requesting it from the kernel per tensor is slow on a CPU."""

from __future__ import annotations

import ctypes
import os
import platform

# the parameters of mallopt(3)
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
PAD = 1 << 28  # minimum growth of the heap in bytes


def keep_memory() -> bool:
    """For a process that allocates large tensors on a CPU; call it before the first.

    glibc requests the memory of a large tensor from the kernel and returns it at once, so that
    every page of every activation is mapped and zeroed again (benchmarks/kept_memory.py measures
    the cost). After this call the process keeps its peak memory. False if there is no glibc, or if
    the environment has the user's own settings.
    """
    if platform.libc_ver()[0] != "glibc" or _chosen_by_user():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1), (TOP_PAD, PAD))
    return all(mallopt(name, value) == 1 for name, value in settings)


def _chosen_by_user() -> bool:
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return tuned or any(name.startswith("MALLOC_") for name in os.environ)
