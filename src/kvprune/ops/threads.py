"""Numba's kernels run on as many threads as torch's."""

import numba
import torch


def match_torch_threads() -> None:
    """Call before a parallel kernel; numba keeps the number for each calling thread."""
    threads = torch.get_num_threads()
    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(threads, most))
    if torch.get_num_threads() != threads:
        # the first call starts numba's threads, and OpenMP then forgets what torch had asked for
        torch.set_num_threads(threads)
