"""Storage: which table the layers of a cache keep their tokens in, and in which form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from kvprune.cache.arena import Arena
from kvprune.cache.extents import ExtentTable
from kvprune.cache.layout import INT_FORMS, KV_FORMS, Layout
from kvprune.cache.slots import SlotTable
from kvprune.errors import PruneError
from kvprune.ops.decode import DECODE
from kvprune.ops.dispatch import REFERENCE
from kvprune.utils.parse import in_bytes

STORES = ("extents", "slots")


@dataclass
class Storage:
    """Extents in one arena for all layers, or rectangular slots; see `PrunedCache`."""

    store: Literal["extents", "slots"] | None = None  # None: extents where a kernel reads them
    kv: str | None = None
    key_int: str | None = None
    budget: int | str | None = None
    arena: Arena | None = None

    def __post_init__(self) -> None:
        if self.store not in (None, *STORES):
            raise PruneError(f"store={self.store!r} is unknown; choose one of {', '.join(STORES)}")
        for name, forms in (("kv", KV_FORMS), ("key_int", INT_FORMS)):
            if (form := getattr(self, name)) is not None and form not in forms:
                raise PruneError(f"{name}={form!r} is unknown; choose one of {', '.join(forms)}")
        options = (self.kv, self.key_int, self.budget, self.arena)
        if any(option is not None for option in options):
            if self.store == "slots":
                raise PruneError("kv, key_int, budget and arena need store='extents'")
            self.store = "extents"
        if self.arena is not None and self.budget is not None:
            raise PruneError("an arena has a budget of its own; give one of arena and budget")
        if isinstance(self.budget, str):
            self.budget = in_bytes(self.budget, "budget")

    def new_table(
        self,
        rows: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        rank: int,
        extra: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> SlotTable | ExtentTable:
        if not self.in_extents(dtype, device):
            return SlotTable(
                rows, heads, key_dim, value_dim=value_dim, rank=rank, extra=extra, dtype=dtype,
                device=device,
            )  # fmt: skip
        return ExtentTable(
            rows, heads, key_dim, value_dim=value_dim, rank=rank, extra=extra, dtype=dtype,
            arena=self.arena_on(device), kv=self.kv, key_int=self.key_int,
        )  # fmt: skip

    def in_extents(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether tables for this device are extents; torch alone reads slots faster on a GPU."""
        if self.store is None:
            own = torch.empty(0, dtype=dtype, device=device)
            return device.type == "cpu" or DECODE.best_backend(own) != REFERENCE
        return self.store == "extents"

    def forms(self, dtype: torch.dtype) -> dict[str, str]:
        """How keys, values and interaction keys are stored, for a model of this dtype."""
        if self.store == "slots":
            return {"kv": str(dtype).removeprefix("torch."), "key_int": "float32"}
        layout = Layout(1, 1, 1, 1, {}, dtype, self.kv, self.key_int)
        stored = {"kv": layout.stored, "key_int": layout.int_stored}
        return {name: str(form).removeprefix("torch.") for name, form in stored.items()}

    def arena_on(self, device: torch.device) -> Arena:
        """The arena of all layers; layers on another device get one of their own each."""
        if self.arena is None:
            assert not isinstance(self.budget, str)
            self.arena = Arena(device, self.budget, shared=False)
        if self.arena.device == device:
            return self.arena
        if self.arena.budget is not None:
            raise PruneError(
                f"the budget is one for {self.arena.device}, but a layer is on {device}; a cache "
                f"on several devices has no budget"
            )
        return Arena(device, shared=False)

    def moved(
        self, table: SlotTable | ExtentTable, device: torch.device
    ) -> SlotTable | ExtentTable:
        """The table on another device."""
        if isinstance(table, SlotTable):
            return table.to(device)
        if self.arena is not None and self.arena.shared:
            raise PruneError(f"the arena that this cache shares stays on {self.arena.device}")
        if self.arena is not None and self.arena.device != device:
            self.arena = Arena(device, self.arena.budget, shared=False)
        return table.copy_to(self.arena_on(device))
