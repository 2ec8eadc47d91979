"""PrunedCache: the cache that transformers sees, on one SlotTable a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    LinearAttentionAndFullAttentionLayer,
)

from kvprune.cache.layer import PrunedHybridLayer, PrunedLayer, Trace
from kvprune.cache.slots import SlotTable
from kvprune.errors import PruneError
from kvprune.methods import policies
from kvprune.ops.timeline import Protection, Timeline, make_timeline

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned


class PrunedCache(Cache):
    """A key-value cache in which every layer holds only its own survivors.

    `model.generate` makes one by itself. Pass your own to keep it for a next turn, to record what
    is dropped when (`record=True`), or to choose the decode kernel (`backend="reference"`).
    """

    def __init__(self, pruned: Pruned, record: bool = False, backend: str | None = None):
        config = pruned.model.config
        layers: list[Any] = list(DynamicCache(config=config).layers)
        extra = policies.columns(pruned.working)
        for site in pruned.sites:
            hybrid = isinstance(layers[site.index], LinearAttentionAndFullAttentionLayer)
            if hybrid:
                number = len(layers[site.index].conv_states)
                layers[site.index] = PrunedHybridLayer(pruned.rank, extra, number_of_states=number)
            else:
                layers[site.index] = PrunedLayer(pruned.rank, extra)
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
        # the mask spans all that was seen and what is new
        if mask is not None and not bool(mask.all()):
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
