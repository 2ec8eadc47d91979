"""Numba's kernels run on as many threads as torch's."""

import numba
import torch


def match_torch_threads() -> None:
    """Call before a parallel kernel; numba keeps the number for each calling thread."""
    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(torch.get_num_threads(), most))
