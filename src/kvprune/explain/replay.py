"""Read a text again with decisions that are given: the same drops, or others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.explain.votes import Votes
from kvprune.integration.forward_pass import Observed
from kvprune.methods.base import Method, Reading, Step
from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned
    from kvprune.methods.interaction import Ballot
    from kvprune.ops.decode import Votes as NewVotes


@dataclass(frozen=True, eq=False)
class Recorded(Method):
    """Every token leaves when the record says; nothing votes."""

    method: ClassVar[str] = "recorded"

    drop_step: Tensor  # (L, T), positions; NEVER if it stays

    def drop_steps(self, reading: Reading) -> Tensor:
        timeline, T = reading.timeline, reading.timeline.clock.shape[1]
        index = self._step(reading.layer, reading.token) - timeline.clock[:, :1]  # (B, P + T)
        index = index.clamp(min=0).where(index < T, NEVER)
        return index.where(timeline.visible_from < NEVER, timeline.index)

    def decode(self, step: Step) -> tuple[NewVotes | None, Tensor | None]:
        token = step.table.get().token
        return step.votes, self._step(step.layer, token) <= step.now[:, None]

    def _step(self, layer: int, token: Tensor) -> Tensor:
        return self.drop_step[layer].to(token.device)[token]


def recorded(pruned: Pruned, drop_step: np.ndarray) -> Recorded:
    return Recorded(torch.from_numpy(drop_step.astype(np.int64)).to(pruned.model.device))


def row(pruned: Pruned, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], device=pruned.model.device)


@torch.no_grad()
def losses(pruned: Pruned, ids: Sequence[int]) -> np.ndarray:
    """-log p of each token given those before it, by the model as it is now: (T,), NaN first."""
    loss = np.full(len(ids), np.nan, dtype=np.float32)
    if len(ids) < 2:
        return loss
    with pruned.evaluating():
        out: Any = pruned.model(input_ids=row(pruned, ids[:-1]), use_cache=False)
    want = torch.tensor(ids[1:], device=out.logits.device)
    # in parts: all logits in float32 once more may not fit in memory
    parts = [
        torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        for logits, targets in zip(out.logits[0].split(256), want.split(256), strict=True)
    ]
    loss[1:] = torch.cat(parts).cpu().numpy()
    return loss


@torch.no_grad()
def read(pruned: Pruned, ids: Sequence[int], cache: PrunedCache | None = None) -> None:
    with pruned.evaluating():
        pruned.model.base_model(
            input_ids=row(pruned, ids), past_key_values=cache, use_cache=cache is not None
        )


@contextmanager
def collecting_votes(pruned: Pruned) -> Iterator[Callable[[], Votes | None]]:
    """Read a row from its start inside; the function then gives its votes, None without any."""
    ballots: list[Ballot] = []
    method = pruned.working

    def note(seen: Observed) -> None:
        if seen.ballot is not None:
            ballots.append(seen.ballot)

    with pruned.observing(note):
        yield lambda: Votes.of(method, ballots) if ballots and method.learns else None


def last_logits(pruned: Pruned, ids: Tensor, cache: PrunedCache | None = None) -> Tensor:
    """The logits (V,) after the last token."""
    only = "logits_to_keep" in inspect.signature(type(pruned.model).forward).parameters
    options = {"logits_to_keep": 1} if only else {}
    out: Any = pruned.model(
        input_ids=ids, past_key_values=cache, use_cache=cache is not None, **options
    )
    logits: Tensor = out.logits[0, -1]
    return logits
