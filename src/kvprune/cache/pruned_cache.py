"""PrunedCache: the cache that transformers sees, with one store per pruned layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
)

from kvprune.cache.arena import Arena
from kvprune.cache.extents import ExtentTable
from kvprune.cache.layer import PrunedHybridLayer, PrunedLayer
from kvprune.cache.record import Record
from kvprune.cache.rows import join, leave, take_snapshot
from kvprune.cache.slots import SlotTable
from kvprune.cache.snapshot import Snapshot
from kvprune.cache.storage import Storage
from kvprune.errors import PruneError
from kvprune.ops.timeline import Protection, Timeline, make_timeline, would_wait
from kvprune.utils.handles import new_handle

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned

# called with a layer's number and the keys and values (B, H, T, D) that attention brings to it
Recorder = Callable[[int, Tensor, Tensor], None]


class PrunedCache(Cache):
    """A key-value cache in which every layer holds only its own survivors.

    `model.generate` creates one itself. Pass your own to keep it for a next turn, to record what
    is dropped when (`record=True`), to choose the decode kernel (`backend="reference"`), or to see
    every key and value that comes in, also those that are dropped (`recorder`).

    Every row of every layer lies in an extent of its own (`store="extents"`), all of them in one
    arena; `arena` is one that several caches share. `budget` is how many bytes it may hold, as a
    number or as text ("512MB"): more is refused with a BudgetError. `kv="int8"` stores keys and
    values in a byte each; `key_int` names the dtype of interaction keys (float32, bfloat16, float16
    or int8). `store="slots"` is the paper's structure: a batch as long as its longest row.
    """

    def __init__(
        self,
        pruned: Pruned,
        record: bool = False,
        backend: str | None = None,
        recorder: Recorder | None = None,
        store: Literal["extents", "slots"] | None = None,
        kv: str | None = None,
        key_int: str | None = None,
        budget: int | str | None = None,
        arena: Arena | None = None,
    ):
        self.storage = Storage(store, kv, key_int, budget, arena)
        self._options: dict[str, Any] = {
            "record": record, "backend": backend, "store": store, "kv": kv, "key_int": key_int
        }  # fmt: skip
        layers: list[Any] = list(DynamicCache(config=pruned.model.config).layers)
        columns = pruned.working.columns
        for site in pruned.sites:
            old, own = layers[site.index], PrunedLayer(pruned.rank, columns, self.storage)
            if isinstance(old, LinearAttentionAndFullAttentionLayer):
                own = PrunedHybridLayer(
                    pruned.rank, columns, self.storage, number_of_states=len(old.conv_states)
                )
            own.record = Record() if record else None
            layers[site.index] = own
        super().__init__(layers=layers)
        self.pruned_indices = [site.index for site in pruned.sites]
        self.backend, self.recorder = backend, recorder
        self._pruned = weakref.ref(pruned)
        self._tokens: Tensor | None = None
        self.whole = True  # whether all layers have read the same tokens
        self._handle = new_handle(self)

    # whether `generate` compiles: only if it was asked to
    is_compileable = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._handle = new_handle(self)

    def _twin(self) -> PrunedCache:
        """An empty cache with the same options, in the same arena."""
        pruned, options = self._model(), dict(self._options)
        if self.storage.in_extents(pruned.model.dtype, pruned.device):
            options["arena"] = self.storage.arena_on(pruned.device)
        return PrunedCache(pruned, **options)

    @property
    def stores(self) -> list[PrunedLayer]:
        return [self.store(index) for index in self.pruned_indices]

    def store(self, index: int) -> PrunedLayer:
        layer = self.layers[index]
        assert isinstance(layer, PrunedLayer)
        return layer

    def timeline(
        self,
        mask: Tensor | None,
        shape: tuple[int, int],
        device: torch.device,
        protection: Protection,
    ) -> Timeline:
        """The timeline of the next T tokens; the mask (B, seen + T) also spans what was read."""
        real: Tensor | None = None
        start: Tensor | int = self.seen
        T = shape[1]
        if mask is not None and (would_wait(mask, T) or not bool(mask.all())):
            real, start = mask[:, -T:].bool(), mask[:, :-T].sum(-1)
        elif self._tokens is not None and bool((self._tokens < self.seen).any()):
            raise PruneError(
                f"the rows have read {self._tokens.tolist()} tokens, but the attention mask shows "
                f"no pads before the shorter ones; pass cache.attention_mask(new)"
            )
        tokens = start + (T if real is None else real.sum(-1))
        self._tokens = tokens if isinstance(tokens, Tensor) else None
        return make_timeline(real, shape, device, protection, start)

    @property
    def tokens(self) -> Tensor:
        """Tokens that each row has read, without pads: (B,)."""
        if self._tokens is not None:
            self._tokens = self._tokens.cpu()
            return self._tokens
        return torch.full((self._tables()[0].rows,), self.seen)

    @tokens.setter
    def tokens(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def attention_mask(self, new: int | Tensor = 1) -> Tensor:
        """The mask (B, seen + T) for T new tokens per row; those read before have pads first.

        new: T, or the mask (B, T) of the new tokens.
        """
        tokens = self.tokens
        if not isinstance(new, Tensor):
            new = torch.ones(len(tokens), new, dtype=torch.long)
        read = torch.arange(self.seen) >= self.seen - tokens[:, None]
        return torch.cat([read.to(new), new], 1)

    def reserve(self) -> None:
        """With a budget: make room for one more token per row, in all layers before the first.

        If it does not suffice, no token was read and none is lost.
        """
        arena = self.storage.arena
        if arena is not None and arena.budget is not None:
            for store in self.stores:
                if isinstance(store.table, ExtentTable):
                    store.table.reserve()

    def trim(self) -> None:
        """After a prompt: give back what it did not need."""
        if self.storage.arena is not None:
            self.storage.arena.trim()

    def check_whole(self) -> None:
        """Raise if a forward pass broke off half-way: its rows can only be read again."""
        if not self.whole:
            raise PruneError(
                "a forward pass of this cache broke off when some layers had read its tokens and "
                "others had not; call cache.reset() and read the text again"
            )

    def break_off(self, seen: int) -> tuple[int, ...]:
        """A forward pass that began after `seen` tokens met an error; the rows that it damaged.

        A cache that was empty is empty again.
        """
        layers = [layer for layer in self.layers if isinstance(layer, DynamicLayer | PrunedLayer)]
        if {layer.get_seq_length() for layer in layers} <= {seen}:
            return ()
        if seen == 0:
            self.reset()
            return ()
        self.whole = False
        return tuple(range(len(self.tokens)))

    def fingerprint(self) -> dict[str, Any]:
        """Of which model, adapter, settings and form of storage its rows are."""
        pruned = self._model()
        return {**pruned.fingerprint(), **self.storage.forms(pruned.model.dtype)}

    def snapshot(self, row: int = 0, **notes: Any) -> Snapshot:
        """A row's survivors as a value, which `join` puts into any cache of the same model."""
        return take_snapshot(self, row, notes)

    def join(self, *snapshots: Snapshot) -> list[int]:
        """Add a row for each snapshot; returns their numbers. Other rows are not touched.

        Rows may have read different numbers of tokens: pass the model `attention_mask`.
        """
        return join(self, snapshots)

    def leave(self, *rows: int) -> None:
        """Let rows go. Other rows are not touched, but those behind move up in number."""
        leave(self, rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self._tokens is not None:
            self._tokens = self.tokens[torch.as_tensor(indices).cpu()]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        if self._tokens is not None:
            self._tokens = self.tokens[beam_idx.cpu()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self._tokens is not None:
            self._tokens = self._tokens.repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self._tokens is not None:
            self._tokens = self._tokens - abs(tokens_to_remove)

    def reset(self) -> None:
        super().reset()  # type: ignore[no-untyped-call]
        self._tokens, self.whole = None, True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.stores[0].seen)

    @property
    def seen(self) -> int:
        """Tokens read so far, pads included: the positions of transformers."""
        return self.get_seq_length()

    @property
    def kept(self) -> Tensor:
        """Tokens held, per pruned layer and row: (L, B)."""
        return torch.stack([table.kept for table in self._tables()])

    @property
    def nbytes(self) -> int:
        """Bytes of all storage, including layers without pruning."""
        own = sum(store.nbytes for store in self.stores)
        if (arena := self.storage.arena) is not None and not arena.shared:
            # what the extents take, and the gaps between them
            own += arena.held - arena.used
        return own + sum(tensor.untyped_storage().nbytes() for tensor in self._other_tensors())

    @property
    def dense_nbytes(self) -> int:
        """Bytes of a `DynamicCache` for the same batch, whose rows are padded to one length."""
        total = sum(tensor.untyped_storage().nbytes() for tensor in self._other_tensors())
        for store in self.stores:
            if store.table is not None:
                total += store.table.rows * store.seen * store.table.dense_nbytes
        return total

    @property
    def drop_step(self) -> Tensor:
        """When each token was dropped, in positions of real tokens: (L, B, tokens)."""
        records = [store.record for store in self.stores]
        if None in records:
            raise PruneError("nothing was recorded; create the cache with PrunedCache(record=True)")
        return torch.stack([record.step for record in records if record is not None])

    @property
    def load_factor(self) -> float:
        """Slots in use / slots that there are, or that attention reads; mean over layers."""
        tables = self._tables()
        return sum(table.load_factor for table in tables) / len(tables)

    def to(self, device: torch.device | str) -> PrunedCache:
        """Move all that is held; in place, like a module's `to`."""
        for store in self.stores:
            if store.held is not None:
                raise PruneError("cannot move a cache while tokens are held back; call crop first")
            if store.table is not None:
                store.table = self.storage.moved(store.table, torch.device(device))
                store.device = torch.device(device)
        return self

    def _model(self) -> Pruned:
        pruned = self._pruned()
        if pruned is None:
            raise PruneError("the model of this cache is gone; keep what attach or load returned")
        return pruned

    def _tables(self) -> list[SlotTable | ExtentTable]:
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
