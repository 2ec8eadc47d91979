"""Numba's kernels run on as many threads as torch's."""

import threading

import numba
import torch

CHOSEN = threading.local()


def use_threads(number: int | None = None) -> None:
    """Call before a parallel kernel; by default as many as torch uses.

    Numba keeps the number for each calling thread, and takes longer to change it than a small
    kernel takes to run.
    """
    torch_threads = torch.get_num_threads()
    number = number or torch_threads
    if getattr(CHOSEN, "number", None) == number:
        return
    most = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(number, most))
    CHOSEN.number = number
    if torch.get_num_threads() != torch_threads:
        # the first call starts numba's threads, and OpenMP then loses torch's setting
        torch.set_num_threads(torch_threads)
