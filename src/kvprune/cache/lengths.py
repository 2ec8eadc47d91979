"""How many tokens each row has while kernels of a GPU change it: exact there, bounded here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvprune.ops.jit import Array


class Read:
    """Numbers on their way from a GPU, which nobody waits for."""

    def __init__(self, numbers: Tensor):
        self.event = torch.cuda.Event() if numbers.is_cuda else None
        self.numbers = torch.empty(
            numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=numbers.is_cuda
        )
        self.numbers.copy_(numbers, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def arrived(self) -> bool:
        return self.event is None or bool(self.event.query())


class Lengths:
    """kept on the device, and on the host  most = kept when it was last read + what came since.

    A token more needs room before anybody knows how many have left, so the host counts none as
    gone until a read has arrived; one is always under way. Rows and their places are those of the
    table that made this: one that changes them by itself makes another.
    """

    def __init__(self, most: Array, where: Array, device: torch.device):
        self.most, self.device = most, device
        self.kept = to_device(most, device)
        self.locate(where)
        self.behind = False  # whether `most` may be too many
        self._read: Read | None = None
        self._since = 0  # tokens per row since the read was begun

    def locate(self, where: Array) -> None:
        """Rows have moved."""
        self.where = to_device(where, self.device)

    def step(self, tokens: int) -> None:
        """A kernel is on its way that may take tokens from rows, and adds at most so many."""
        if self._read is None:
            self._read, self._since = Read(self.kept), 0
        self.most += tokens
        self._since += tokens
        self.behind = True

    def catch_up(self) -> None:
        """Lower the bounds if a read has arrived."""
        if self._read is not None and self._read.arrived():
            np.minimum(self.most, self._read.numbers.numpy() + self._since, out=self.most)
            self._read = None

    def wait(self) -> None:
        """Make the bounds exact; the only call here that waits for the device."""
        if self.behind:
            self.most[:] = self.kept.cpu().numpy()
            self.behind, self._read = False, None


def to_device(numbers: Array, device: torch.device) -> Tensor:
    """A copy; from pinned memory, where the host need not wait until it is made."""
    x = torch.from_numpy(numbers.copy())
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
