"""Freed memory stays with the process: asking the kernel anew for each tensor is slow on a CPU."""

from __future__ import annotations

import ctypes
import os
import platform

# the parameters of mallopt(3)
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
PAD = 1 << 28  # bytes that the heap grows by at least


def keep_memory() -> bool:
    """For a process that makes and frees large tensors on a CPU; call it before the first.

    glibc fetches a tensor of many megabytes from the kernel and gives it back at once, so that
    every page of every activation is mapped and zeroed again (benchmarks/kept_memory.py says what
    that costs). From here on the process keeps what it has had, its peak. False where there is no
    glibc, or where the environment has settings of the user's own.
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
