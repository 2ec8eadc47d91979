"""How OpenMP's idle threads wait: briefly in a loop, then asleep."""

from __future__ import annotations

import os
import sys

SPINS = "1000"
# any of these is the user's own choice
CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def spin_briefly() -> bool:
    """Call before torch is imported: OpenMP reads its variables once. False if nothing was set.

    torch and Numba each have a pool of threads, and after each operation libgomp's wait in a loop
    of 300,000 rounds for the next one. One other busy process on the machine, and they take the
    cores from the thread that they wait for: everything is many times slower. After 1,000 rounds
    the next operation is mostly there already, so that a quiet machine loses nothing
    (benchmarks/threads.py measures both).
    """
    if "torch" in sys.modules or any(name in os.environ for name in CHOICES):
        return False
    os.environ["GOMP_SPINCOUNT"] = SPINS
    return True
