"""PrunedCache: the cache that transformers sees, with one store per pruned layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    LinearAttentionAndFullAttentionLayer,
)

from kvprune.cache.layer import PrunedHybridLayer, PrunedLayer
from kvprune.cache.record import Record
from kvprune.cache.slots import SlotTable
from kvprune.errors import PruneError
from kvprune.ops.timeline import Protection, Timeline, make_timeline

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned

# called with a layer's number and the keys and values (B, H, T, D) that attention brings to it
Recorder = Callable[[int, Tensor, Tensor], None]


class PrunedCache(Cache):
    """A key-value cache in which every layer holds only its own survivors.

    `model.generate` creates one itself. Pass your own to keep it for a next turn, to record what
    is dropped when (`record=True`), to choose the decode kernel (`backend="reference"`), or to see
    every key and value that comes in, also those that are dropped (`recorder`).
    """

    def __init__(
        self,
        pruned: Pruned,
        record: bool = False,
        backend: str | None = None,
        recorder: Recorder | None = None,
    ):
        layers: list[Any] = list(DynamicCache(config=pruned.model.config).layers)
        columns = pruned.working.columns
        for site in pruned.sites:
            old, store = layers[site.index], PrunedLayer(pruned.rank, columns)
            if isinstance(old, LinearAttentionAndFullAttentionLayer):
                number = len(old.conv_states)
                store = PrunedHybridLayer(pruned.rank, columns, number_of_states=number)
            store.record = Record() if record else None
            layers[site.index] = store
        super().__init__(layers=layers)
        self.pruned_indices = [site.index for site in pruned.sites]
        self.backend, self.recorder = backend, recorder
        self._pads: Tensor | int = 0  # read so far, per row: (B,)

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
        if mask is not None and not bool(mask.all()):
            T = shape[1]
            real, start = mask[:, -T:].bool(), mask[:, :-T].sum(-1)
            self._pads = (mask == 0).sum(-1)
        return make_timeline(real, shape, device, protection, start)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.stores[0].seen)

    @property
    def seen(self) -> int:
        """Tokens read so far, pads included: the positions of transformers."""
        return self.get_seq_length()

    @property
    def tokens(self) -> Tensor:
        """Real tokens read so far, per row: (B,)."""
        return torch.full_like(self._tables()[0].kept, self.seen) - self._pads

    @property
    def kept(self) -> Tensor:
        """Tokens held, per pruned layer and row: (L, B)."""
        return torch.stack([table.kept for table in self._tables()])

    @property
    def nbytes(self) -> int:
        """Bytes of all storage, including layers without pruning."""
        return sum(store.nbytes for store in self.stores) + sum(
            tensor.untyped_storage().nbytes() for tensor in self._other_tensors()
        )

    @property
    def dense_nbytes(self) -> int:
        """Bytes of a `DynamicCache` for the same batch, whose rows are padded to one length."""
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
        records = [store.record for store in self.stores]
        if None in records:
            raise PruneError("nothing was recorded; create the cache with PrunedCache(record=True)")
        return torch.stack([record.step for record in records if record is not None])

    @property
    def load_factor(self) -> float:
        """Slots in use by the longest row / slots that attention reads, mean over layers."""
        tables = self._tables()
        return sum(table.load_factor for table in tables) / len(tables)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select_pads(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if isinstance(self._pads, Tensor):
            self._pads = self._pads.repeat_interleave(repeats)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._select_pads(beam_idx)

    def reset(self) -> None:
        super().reset()  # type: ignore[no-untyped-call]
        self._pads = 0

    def to(self, device: torch.device | str) -> PrunedCache:
        """Move all that is held; in place, like a module's `to`."""
        for store in self.stores:
            if store.held is not None:
                raise PruneError("cannot move a cache while tokens are held back; call crop first")
            if store.table is not None:
                store.table.to(device)
                store.device = torch.device(device)
        return self

    def _select_pads(self, rows: Tensor) -> None:
        if isinstance(self._pads, Tensor):
            self._pads = self._pads[torch.as_tensor(rows, device=self._pads.device)]

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
