"""Kernels leave torch's number of threads alone."""

import subprocess
import sys

SCRIPT = """
import torch
torch.set_num_threads(1)
import numba
from kvprune.ops.threads import use_threads
for _ in range(2):
    use_threads()
    print(torch.get_num_threads(), numba.get_num_threads())
"""


def test_the_first_kernel_does_not_change_torchs_threads():
    """In a process of its own, as numba starts its threads once."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1", "1", "1"], done.stderr
