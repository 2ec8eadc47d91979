"""What one layer holds between forward passes, as a cache layer of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvprune.cache.extents import ExtentTable
from kvprune.cache.record import Record
from kvprune.cache.slots import SlotTable
from kvprune.cache.storage import Storage
from kvprune.errors import PruneError
from kvprune.ops.decode.table import Slots
from kvprune.ops.never import NEVER


@dataclass
class Held:
    """Tokens read while the past is being recorded: no decision on or by them is final yet.

    Steps count real and pad tokens of the full sequence, as `PrunedLayer.seen` does.
    """

    slot_step: Tensor  # (B, S), when each slot of the table is dropped, NEVER if it is not
    tokens: Slots  # (B, ..., P, ...), `valid` is False for a pad
    step: Tensor  # (B, P), when each held token is dropped
    index: Tensor  # (P,), which token of the sequence it is


class PrunedLayer(CacheLayerMixin):
    """One layer's survivors. The attention function fills it; `update` only passes through."""

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        rank: int = 0,
        columns: Mapping[str, tuple[int, ...]] | None = None,
        storage: Storage | None = None,
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self.rank, self.columns = rank, dict(columns or {})
        self.storage = Storage() if storage is None else storage
        self.table: SlotTable | ExtentTable | None = None
        self.seen = 0  # tokens read, pads included: what transformers counts positions by
        self.record_past = False
        self.held: Held | None = None
        self.record: Record | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, H, _, D = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.table = self.storage.new_table(
            B, H, D, value_states.shape[-1], self.rank, self.columns, self.dtype, self.device
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def begin(self, key: Tensor, value: Tensor) -> SlotTable | ExtentTable:
        """The table for these keys and values, as attention sees them; created at the first call.

        Not in `update`: models with latent attention give it something smaller.
        """
        if self.table is None:
            self.lazy_initialization(key, value)
        assert self.table is not None
        return self.table

    def past(self) -> Slots:
        """All keys that a next token may see or vote on, valid where they are not dropped."""
        assert self.table is not None
        slots = self.table.get()
        if self.held is None:
            return slots
        held = self.held
        slots = slots._replace(valid=slots.valid & (held.slot_step == NEVER))
        tokens = held.tokens._replace(valid=held.tokens.valid & (held.step == NEVER))
        return _join(slots, tokens)

    def past_columns(self) -> dict[str, Tensor]:
        """What the method stores with each of the table's slots: (B, S, ...)."""
        assert self.table is not None
        return {name: self.table.column(name) for name in self.columns}

    def absorb(self, tokens: Slots, step: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Take in what was read: `step` (B, P + T) is when each past and new key is dropped.

        Steps are relative to the first new token. While the past is recorded all are held back.
        `columns`: what the method stores with each new token.
        """
        assert self.table is not None
        T = tokens.token.shape[1]
        P = step.shape[1] - T
        if not self.record_past and self.held is None:
            if P:
                self.table.remove((step[:, :P] < NEVER) & self.table.members().valid)
            stays = step[:, P:] == NEVER
            self.table.push(*tokens[:4], valid=None if bool(stays.all()) else stays, **columns)
        else:
            self._hold(tokens, step)
        self.seen += T

    def _hold(self, tokens: Slots, step: Tensor) -> None:
        assert self.table is not None
        S, T = self.table.width, tokens.token.shape[1]
        absolute = (step + self.seen).where(step < NEVER, NEVER)
        index = torch.arange(self.seen, self.seen + T, device=step.device)
        if self.held is None:
            self.held = Held(absolute[:, :S], tokens, absolute[:, S:], index)
            return
        held = self.held
        old = torch.cat([held.slot_step, held.step], 1)
        P = old.shape[1]
        old = old.where(old < NEVER, absolute[:, :P])
        self.held = Held(
            old[:, :S],
            _join(held.tokens, tokens),
            torch.cat([old[:, S:], absolute[:, P:]], 1),
            torch.cat([held.index, index]),
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens as if they had never been read, then make the rest final."""
        remove = abs(tokens_to_remove)
        if self.table is None or (remove == 0 and self.held is None):
            return
        held = self.held
        if held is None or remove > len(held.index):
            raise PruneError(
                f"cannot take back {remove} tokens: what they dropped is gone for good; call "
                f"activate_past_recording() on the cache before reading them"
            )
        cut = self.seen - remove
        stay = int((held.index < cut).sum())
        self.table.remove((held.slot_step < cut) & self.table.members().valid)
        tokens, alive = held.tokens, held.tokens.valid & (held.step >= cut)
        self.table.push(
            tokens.keys[:, :, :stay],
            tokens.values[:, :, :stay],
            tokens.key_int[:, :stay],
            tokens.token[:, :stay],
            valid=alive[:, :stay],
        )
        self.held, self.seen = None, cut
        if self.record is not None:
            self.record.crop(remove)

    def activate_past_recording(self) -> None:
        self.record_past = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        if self.table is not None:
            # at once: an error that is still being handled may keep the table alive
            self.table.release(torch.arange(self.table.rows))
        self.table, self.held, self.seen = None, None, 0
        self.record = None if self.record is None else Record()
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.table is not None:
            rows = torch.arange(self.table.rows, device=self.table.stored.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.table is None:
            return
        indices = torch.as_tensor(indices, device=self.table.stored.device)
        if self.held is not None:
            # held tokens refer to slots by number, and rows that move may be packed again
            count = len(self.held.index)
            raise PruneError(f"cannot move rows while {count} tokens are held back; crop first")
        self.table.select(indices)
        if self.record is not None:
            self.record.select(indices)

    def offload(self) -> None:
        raise PruneError("a pruned cache is small and cannot be offloaded; use offloading=False")

    prefetch = offload

    @property
    def nbytes(self) -> int:
        held = () if self.held is None else (*self.held.tokens, self.held.slot_step, self.held.step)
        own = 0 if self.table is None else self.table.nbytes
        return own + sum(tensor.untyped_storage().nbytes() for tensor in held)


class PrunedHybridLayer(LinearAttentionLayer, PrunedLayer):  # type: ignore[misc, override]
    """A layer that has a recurrent state besides its attention (Falcon-H1)."""

    def __init__(
        self,
        rank: int = 0,
        columns: Mapping[str, tuple[int, ...]] | None = None,
        storage: Storage | None = None,
        **kwargs: Any,
    ) -> None:
        PrunedLayer.__init__(self, rank, columns, storage)
        LinearAttentionLayer.__init__(self, **kwargs)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # by position for keys and values, by keyword for the recurrent states
        part = PrunedLayer if args else LinearAttentionLayer
        part.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        PrunedLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        PrunedLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        PrunedLayer.crop(self, tokens_to_remove)

    def activate_past_recording(self) -> None:
        LinearAttentionLayer.activate_past_recording(self)
        PrunedLayer.activate_past_recording(self)


def _join(a: Slots, b: Slots) -> Slots:
    heads = [torch.cat([x, y], 2) for x, y in zip(a[:2], b[:2], strict=True)]
    return Slots(*heads, *(torch.cat([x, y], 1) for x, y in zip(a[2:], b[2:], strict=True)))
