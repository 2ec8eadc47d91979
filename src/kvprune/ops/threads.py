"""Numba's kernels run on as many threads as torch's."""

import threading

import numba
import torch

CHOSEN = threading.local()


def use_threads(number: int | None = None) -> int:
    """Call before a parallel kernel; by default as many as torch uses. How many it will have.

    Numba keeps the number for each calling thread, and takes longer to change it than a small
    kernel takes to run.
    """
    torch_threads = torch.get_num_threads()
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    number = min(number or torch_threads, most)
    if getattr(CHOSEN, "number", None) == number:
        return number
    numba.set_num_threads(number)
    CHOSEN.number = number
    if torch.get_num_threads() != torch_threads:
        # the first call starts numba's threads, and OpenMP then loses torch's setting
        torch.set_num_threads(torch_threads)
    return number
