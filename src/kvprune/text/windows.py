"""A text cut into windows: what the model reads, what it predicts, and what is counted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvprune.errors import PruneError

IGNORE = -100  # no target


@dataclass(frozen=True)
class Windows:
    """Rows that are read independently, each token predicting the next.

    The token after position t is predicted from a context of t + 1. Positions before `first` are
    context only: neither their predictions nor their dropped tokens are counted.
    """

    ids: Tensor  # (W, T)
    targets: Tensor  # (W, T), IGNORE where the text ends
    first: int = 0

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def digest(self) -> str:
        """Changes with any token, so that results of another text are not mixed in."""
        digest = hashlib.blake2b(str(self.first).encode(), digest_size=8)
        for part in (self.ids, self.targets):
            digest.update(part.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def part(self, start: int, stop: int) -> Windows:
        return Windows(self.ids[start:stop], self.targets[start:stop], self.first)


def cut(
    ids: Tensor, length: int | None = None, stride: int | None = None, limit: int | None = None
) -> Windows:
    """A text (tokens,) as windows of `length`; rows (W, T) are windows already.

    Windows follow one another; with a stride s < length each starts s tokens after the previous
    one, and its first length − s tokens are context only: every token is then predicted from a
    context of more than length − s. `limit`: maximum number of windows, from the start.
    """
    if ids.dim() not in (1, 2) or ids.is_floating_point():
        raise PruneError(
            f"a text is whole numbers (tokens,) or windows (rows, tokens), not {ids.dtype} of "
            f"shape {tuple(ids.shape)}"
        )
    if limit is not None and limit < 1:
        raise PruneError(f"{limit} windows are too few; read at least 1")
    if ids.dim() == 2:
        if length not in (None, ids.shape[1]) or stride not in (None, ids.shape[1]):
            raise PruneError(
                f"the text is windows of {ids.shape[1]} tokens already; pass it as one row of "
                f"tokens to cut it by another length or stride"
            )
        return _checked(
            Windows(ids[:limit].long(), F.pad(ids[:limit, 1:].long(), (0, 1), value=IGNORE))
        )
    if length is None or length < 2:
        raise PruneError(f"length={length} must be a whole number of tokens, 2 or more")
    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise PruneError(f"stride={stride} must be from 1 to the length of a window, {length}")
    if len(ids) < length:
        raise PruneError(
            f"the text has {len(ids)} tokens, fewer than the {length} of one window; lower the "
            f"length or add text"
        )
    if limit is not None:
        ids = ids[: (limit - 1) * stride + length + 1]
    after = F.pad(ids[1:].long(), (0, 1), value=IGNORE)
    # views: windows that overlap share their memory
    windows = Windows(
        ids.long().unfold(0, length, stride)[:limit],
        after.unfold(0, length, stride)[:limit],
        length - stride,
    )
    return _checked(windows)


def _checked(windows: Windows) -> Windows:
    if not len(windows) or not (windows.targets[:, windows.first :] != IGNORE).any():
        raise PruneError(
            f"{len(windows)} windows of {windows.length} tokens hold nothing to predict; add text"
        )
    return windows


def sizes(length: int, first: int = 0) -> list[int]:
    """The context sizes 1, 2, 4, … and `length`, without those that are context only."""
    doubling = [2**i for i in range(length.bit_length()) if 2**i < length]
    return [size for size in [*doubling, length] if size > first]
