"""A flat pass: the tokens of many texts side by side in one row, without pads.

The model sees (1, N) tokens, each with the position in its own text. Only attention must know which
belong together: it walks the parts, and each part reads or decodes with its own cache, as if it
were alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvprune.cache.layer import PrunedLayer
from kvprune.cache.pruned_cache import PrunedCache
from kvprune.errors import PruneError
from kvprune.integration.attend import Call, attend
from kvprune.integration.forward_pass import ForwardPass
from kvprune.methods.base import Method
from kvprune.ops.timeline import Timeline, make_timeline

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned


class Part(NamedTuple):
    """The same number of new tokens for every row of one cache."""

    cache: PrunedCache
    ids: Tensor  # (B, T)
    method: Method  # what is dropped
    pruned: Pruned | None = None  # whose LoRA and votes; None: those of the model that runs


class _Run(NamedTuple):
    """A part while the pass runs."""

    forward: ForwardPass
    timeline: Timeline
    tokens: slice  # of the flat row


class FlatPass:
    """Handed to every attention call in place of a `ForwardPass`.

    Parts of one model side by side are a group: its LoRA and its votes are computed in one go.
    """

    def __init__(self, pruned: Pruned, parts: Sequence[Part]):
        self.parts, self.runs = parts, list[_Run]()
        self.groups: list[tuple[slice, Pruned]] = []
        self.members: list[list[_Run]] = []  # of each group
        self.notes: dict[Any, Any] = {}  # what layers work out about the groups, once for all
        start, positions = 0, []
        for cache, ids, method, own in parts:
            cache.check_whole()
            B, T = ids.shape
            old = cache.tokens.to(ids.device) if cache.seen else ids.new_zeros(B)
            timeline = make_timeline(None, (B, T), ids.device, method.protection(), old)
            forward = ForwardPass(method, pruned.alpha, True, False, cache)
            self._add(_Run(forward, timeline, slice(start, start + B * T)), own or pruned)
            positions.append(timeline.clock.flatten())
            start += B * T
        self.positions = torch.cat(positions).long()[None]
        self.length = start

    def _add(self, run: _Run, pruned: Pruned) -> None:
        self.runs.append(run)
        if self.groups and self.groups[-1][1] is pruned:
            first = self.groups[-1][0].start
            self.groups[-1] = slice(first, run.tokens.stop), pruned
            self.members[-1].append(run)
        else:
            self.groups.append((run.tokens, pruned))
            self.members.append([run])

    def attend(self, call: Call) -> Tensor:
        """(1, Hq, N, Dv): each part by itself."""
        outs = []
        for (at, pruned), runs in zip(self.groups, self.members, strict=True):
            layer = pruned.layers[call.layer.number]
            own = call._replace(layer=layer, hidden=call.hidden[:, at])
            outs += self._attend(own._replace(cast=own.ballot()), at.start, runs)
        return torch.cat(outs, 1)[None]

    @staticmethod
    def _attend(call: Call, start: int, runs: Sequence[_Run]) -> list[Tensor]:
        """The parts of one group, whose hidden states and votes begin at a token."""
        ballot, outs = call.cast, []
        for forward, timeline, at in runs:
            B, T = timeline.clock.shape
            within = slice(at.start - start, at.stop - start)

            def rows(x: Tensor, at: slice = at, B: int = B, T: int = T) -> Tensor:
                """(1, H, N, D) → (B, H, T, D)"""
                parts: Tensor = x[0, :, at].unflatten(1, (B, T))
                return parts.transpose(0, 1)

            own = None
            if ballot is not None:
                q_int, k_int = (x[0, within].unflatten(0, (B, T)) for x in ballot[:2])
                own = ballot._replace(q_int=q_int, k_int=k_int)
            out = attend(
                forward,
                call._replace(
                    hidden=call.hidden[0, within].unflatten(0, (B, T)),
                    query=rows(call.query),
                    key=rows(call.key),
                    value=rows(call.value),
                    cast=own,
                ),
                timeline,
            )
            outs.append(out.transpose(0, 1).flatten(1, 2))
        return outs

    def end(self) -> None:
        """All layers have read the tokens."""
        for (forward, timeline, _), part in zip(self.runs, self.parts, strict=True):
            part.cache.tokens = (timeline.clock[:, -1] + 1).long().cpu()
            forward.close()

    def break_off(self) -> None:
        """It met an error: caches that were empty are so again, the others must not be used."""
        for forward, _, _ in self.runs:
            if forward.cache is not None:
                forward.cache.break_off(forward.seen)
            forward.close()


@torch.inference_mode()
def flat_forward(pruned: Pruned, parts: Sequence[Part], logits_at: Tensor) -> Tensor:
    """Read the new tokens of all parts; the logits after some of them: (len(logits_at), V).

    logits_at: (K,), which tokens of the flat row, part by part and row by row.
    """
    run = FlatPass(pruned, parts)
    ids = torch.cat([part.ids.flatten() for part in parts])[None]
    # models that pass no keyword arguments on to their attention find it here
    pruned._hooks.latest = run
    try:
        out: Any = pruned.model(
            input_ids=ids,
            position_ids=run.positions,
            # all are real, and transformers need not look for packed texts
            attention_mask=torch.ones_like(ids),
            use_cache=False,
            logits_to_keep=logits_at,
            kvprune_pass=run,
        )
    except BaseException:
        run.break_off()
        raise
    finally:
        pruned._hooks.latest = None
    run.end()
    logits: Tensor = out.logits[0]
    return logits


def check_flat(pruned: Pruned) -> None:
    """Raise if the model cannot read a flat batch."""
    name = type(pruned.model).__name__
    missing = {"position_ids", "logits_to_keep"} - set(
        inspect.signature(type(pruned.model).forward).parameters
    )
    if missing:
        raise PruneError(
            f"{name} takes no {' and no '.join(sorted(missing))}, so texts of different lengths "
            f"cannot be read side by side; use kvprune generate"
        )
    others = [
        f"layer {index} ({type(layer).__name__})"
        for index, layer in enumerate(PrunedCache(pruned).layers)
        if type(layer) is not PrunedLayer
    ]
    if others:
        raise PruneError(
            f"{name} has layers that are not pruned, such as sliding windows: {others[0]}"
            f"{f' and {len(others) - 1} more' if others[1:] else ''}; texts of different lengths "
            f"cannot be read side by side, use kvprune generate"
        )
