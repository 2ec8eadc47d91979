"""PrunedCache: the cache that transformers sees, on one SlotTable a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from kvprune.errors import PruneError
from kvprune.ops.timeline import NEVER, Protection, Timeline, make_timeline
from kvprune.slots import Slots, SlotTable

if TYPE_CHECKING:
    from kvprune.pruned import Pruned


@dataclass
class Held:
    """Tokens read while the past is being recorded: no decision on or by them is final yet.

    Steps count real and pad tokens of the whole sequence, as `PrunedLayer.seen` does.
    """

    slot_step: Tensor  # (B, S), when each slot of the table is dropped, NEVER if it is not
    tokens: Slots  # (B, ..., P, ...), `valid` is False for a pad
    step: Tensor  # (B, P), when each held token is dropped
    index: Tensor  # (P,), which token of the sequence it is


class Trace:
    """When each token was dropped, by positions: what `PrunedCache(record=True)` keeps."""

    def __init__(self) -> None:
        self.step = torch.empty(0, 0, dtype=torch.long)  # (B, tokens), NEVER if it is still there

    def note(self, token: Tensor, dropper: Tensor, length: int) -> None:
        """The tokens (B, K) left with the droppers (B, K) or (B, 1); -1 is no token."""
        B, old = len(token), self.step.shape[1]
        step = torch.full((B, max(length, old) + 1), NEVER)
        step[:, :old] = self.step if old else step[:, :0]
        # nobody's column is the last one, which is cut off again
        step.scatter_(1, token.cpu() % step.shape[1], dropper.cpu().expand_as(token))
        self.step = step[:, :-1]

    def crop(self, remove: int) -> None:
        self.step = self.step[:, : self.step.shape[1] - remove].clone()
        self.step[self.step >= self.step.shape[1]] = NEVER

    def select(self, rows: Tensor) -> None:
        self.step = self.step[rows.cpu()]


class PrunedLayer(CacheLayerMixin):
    """One layer's survivors. The attention function fills it; `update` only passes through."""

    is_sliding = False
    is_croppable = True

    def __init__(self, rank: int, extra: dict[str, tuple[int, ...]] | None = None):
        super().__init__()
        self.rank, self.extra = rank, extra or {}
        self.table: SlotTable | None = None
        self.seen = 0  # tokens read, pads included: what transformers counts positions by
        self.record_past = False
        self.held: Held | None = None
        self.trace: Trace | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, H, _, D = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.table = SlotTable(
            B, H, D, value_dim=value_states.shape[-1], rank=self.rank, extra=self.extra,
            dtype=self.dtype, device=self.device,
        )  # fmt: skip
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def begin(self, key: Tensor, value: Tensor) -> SlotTable:
        """The table for these keys and values, as attention sees them; made at the first call.

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

    def absorb(self, tokens: Slots, step: Tensor) -> None:
        """Take in what was read: `step` (B, P + T) says when each past and new key is dropped.

        Steps are relative to the first new token. While the past is recorded all is held back.
        """
        assert self.table is not None
        T = tokens.token.shape[1]
        P = step.shape[1] - T
        if not self.record_past and self.held is None:
            self.table.remove((step[:, :P] < NEVER) & self.table.get().valid)
            stays = step[:, P:] == NEVER
            self.table.push(*tokens[:4], valid=None if bool(stays.all()) else stays)
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
        self.table.remove((held.slot_step < cut) & self.table.get().valid)
        tokens, alive = held.tokens, held.tokens.valid & (held.step >= cut)
        self.table.push(
            tokens.keys[:, :, :stay],
            tokens.values[:, :, :stay],
            tokens.key_int[:, :stay],
            tokens.token[:, :stay],
            valid=alive[:, :stay],
        )
        self.held, self.seen = None, cut
        if self.trace is not None:
            self.trace.crop(remove)

    def activate_past_recording(self) -> None:
        self.record_past = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.table, self.held, self.seen = None, None, 0
        self.trace = None if self.trace is None else Trace()
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.table is not None:
            rows = torch.arange(self.table.rows, device=self.table.token.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.table is None:
            return
        indices = torch.as_tensor(indices, device=self.table.token.device)
        if self.held is not None:
            held = self.held
            # the table keeps its slots in place when rows move, unless it packs: settle first
            raise PruneError(
                f"cannot reorder rows while {len(held.index)} tokens are held back; call crop first"
            )
        self.table.select(indices)
        if self.trace is not None:
            self.trace.select(indices)

    def offload(self) -> None:
        raise PruneError("a pruned cache is small and cannot be offloaded; use offloading=False")

    prefetch = offload

    @property
    def nbytes(self) -> int:
        held = () if self.held is None else (*self.held.tokens, self.held.slot_step, self.held.step)
        own = 0 if self.table is None else self.table.nbytes
        return own + sum(tensor.untyped_storage().nbytes() for tensor in held)


class PrunedHybridLayer(LinearAttentionLayer, PrunedLayer):  # type: ignore[misc, override]
    """A layer that has a recurrent state beside its attention (Falcon-H1)."""

    def __init__(
        self, rank: int, extra: dict[str, tuple[int, ...]] | None = None, **kwargs: Any
    ) -> None:
        PrunedLayer.__init__(self, rank, extra)
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


class PrunedCache(Cache):
    """A key-value cache in which every layer holds only its own survivors.

    `model.generate` makes one by itself. Pass your own to keep it for a next turn, to record what
    is dropped when (`record=True`), or to choose the decode kernel (`backend="reference"`).
    """

    def __init__(self, pruned: Pruned, record: bool = False, backend: str | None = None):
        config = pruned.model.config
        layers: list[Any] = list(DynamicCache(config=config).layers)
        for site in pruned.sites:
            hybrid = isinstance(layers[site.index], LinearAttentionAndFullAttentionLayer)
            if hybrid:
                number = len(layers[site.index].conv_states)
                layers[site.index] = PrunedHybridLayer(pruned.rank, number_of_states=number)
            else:
                layers[site.index] = PrunedLayer(pruned.rank)
            layers[site.index].trace = Trace() if record else None
        super().__init__(layers=layers)
        self.pruned_indices = [site.index for site in pruned.sites]
        self.backend = backend
        self._pass: tuple[Any, ...] = ()

    @property
    def stores(self) -> list[PrunedLayer]:
        return [self.store(index) for index in self.pruned_indices]

    def store(self, index: int) -> PrunedLayer:
        layer = self.layers[index]
        assert isinstance(layer, PrunedLayer)
        return layer

    def timeline(
        self,
        store: PrunedLayer,
        mask: Tensor | None,
        shape: tuple[int, int],
        device: torch.device,
        rules: Protection,
    ) -> Timeline:
        """The timeline of this pass's tokens; made by its first layer, shared by the others."""
        if self._pass and self._pass[:2] == (store.seen, shape) and self._pass[2] is mask:
            made: Timeline = self._pass[3]
            return made
        B, T = shape
        real: Tensor | None = None
        start: Tensor | int = store.seen
        if mask is not None:
            # the mask spans all that was seen and what is new
            real, start = mask[:, -T:].bool(), mask[:, :-T].sum(-1)
        made = make_timeline(real, (B, T), device, rules, start)
        self._pass = (store.seen, shape, mask, made)
        return made

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.stores[0].seen)

    @property
    def seen(self) -> int:
        """Tokens read so far, pads included."""
        return self.get_seq_length()

    @property
    def kept(self) -> Tensor:
        """Tokens held, a pruned layer a row, a sequence a column: (L, B)."""
        return torch.stack([table.kept for table in self._tables()])

    @property
    def nbytes(self) -> int:
        """Bytes of all storage, of the layers that are left alone, too."""
        return sum(store.nbytes for store in self.stores) + sum(
            tensor.untyped_storage().nbytes() for tensor in self._other_tensors()
        )

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the keys and values of a dense cache for the same tokens."""
        total = sum(tensor.untyped_storage().nbytes() for tensor in self._other_tensors())
        for store in self.stores:
            if store.table is not None:
                keys, values = store.table.keys, store.table.values
                width = keys.shape[-1] + values.shape[-1]
                total += keys.shape[0] * keys.shape[1] * store.seen * width * keys.element_size()
        return total

    @property
    def drop_step(self) -> Tensor:
        """When each token was dropped, in positions of real tokens: (L, B, tokens)."""
        traces = [store.trace for store in self.stores]
        if None in traces:
            raise PruneError("nothing was recorded; make the cache with PrunedCache(record=True)")
        return torch.stack([trace.step for trace in traces if trace is not None])

    @property
    def load_factor(self) -> float:
        """Slots in use by the longest row / slots that attention reads, mean over layers."""
        tables = self._tables()
        return sum(table.load_factor for table in tables) / len(tables)

    def to(self, device: torch.device | str) -> PrunedCache:
        """Move all that is held; in place, like a module's `to`."""
        for store in self.stores:
            if store.held is not None:
                raise PruneError("cannot move a cache while tokens are held back; call crop first")
            if store.table is not None:
                store.table.to(device)
                store.device = torch.device(device)
        self._pass = ()
        return self

    def _tables(self) -> list[SlotTable]:
        tables = [store.table for store in self.stores if store.table is not None]
        if not tables:
            raise PruneError("the cache is empty: nothing was read yet")
        return tables

    def _other_tensors(self) -> Iterator[Tensor]:
        for index, layer in enumerate(self.layers):
            if index not in self.pruned_indices:
                for name in ("keys", "values"):
                    if isinstance(value := getattr(layer, name, None), Tensor):
                        yield value


def _join(a: Slots, b: Slots) -> Slots:
    heads = [torch.cat([x, y], 2) for x, y in zip(a[:2], b[:2], strict=True)]
    return Slots(*heads, *(torch.cat([x, y], 1) for x, y in zip(a[2:], b[2:], strict=True)))
