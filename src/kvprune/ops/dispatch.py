"""Which implementation of an operation runs: one table of backends for all operations."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from importlib.util import find_spec
from typing import Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from kvprune.errors import PruneError

Args = ParamSpec("Args")
Out = TypeVar("Out")


class Backend(NamedTuple):
    device: str  # the type of device that it runs on
    package: str  # what it is written in; must be installed


REFERENCE = "reference"
# fastest first; the reference, plain torch, runs on every device
BACKENDS = {"cpu": Backend(device="cpu", package="numba")}


class Operation(Generic[Args, Out]):
    """A function of a `reference` module, and those of the same name in the modules next to it.

    Those modules are named after their backends, and imported when first used: numba takes half a
    second. `dtypes` lists the backends that exist, and the dtypes that each of them takes.
    """

    def __init__(self, reference: Callable[Args, Out], **dtypes: Collection[torch.dtype]) -> None:
        self.name, self.dtypes = reference.__name__, dtypes
        self._package = reference.__module__.rpartition(".")[0]
        self._chosen: dict[tuple[str | None, torch.dtype, torch.device], Callable[Args, Out]] = {}

    def implementation(self, x: Tensor, backend: str | None = None) -> Callable[Args, Out]:
        """The function for tensors like x: of this backend, or of the fastest that fits."""
        key = backend, x.dtype, x.device
        function = self._chosen.get(key)
        if function is None:
            name = self.best_backend(x) if backend is None else self._checked(backend, x)
            function = getattr(import_module(f"{self._package}.{name}"), self.name)
            self._chosen[key] = function
        return function

    def available(self, exclude: str | Collection[str] = ()) -> list[str]:
        """The backends that can run here."""
        excluded = {exclude} if isinstance(exclude, str) else set(exclude)
        installed = [name for name in self.dtypes if find_spec(BACKENDS[name].package)]
        return [name for name in (REFERENCE, *installed) if name not in excluded]

    def best_backend(self, x: Tensor) -> str:
        """The fastest backend for tensors like x."""
        available = self.available()
        fits = (name for name in BACKENDS if name in available and self._fits(name, x))
        return next(fits, REFERENCE)

    def _fits(self, backend: str, x: Tensor) -> bool:
        return x.device.type == BACKENDS[backend].device and x.dtype in self.dtypes[backend]

    def _checked(self, backend: str, x: Tensor) -> str:
        available = self.available()
        if backend not in available:
            raise PruneError(
                f"{self.name} has no backend {backend!r} here; use one of {', '.join(available)}"
            )
        if backend != REFERENCE and not self._fits(backend, x):
            dtypes = " or ".join(
                str(dtype).removeprefix("torch.") for dtype in self.dtypes[backend]
            )
            raise PruneError(
                f"the {backend} backend of {self.name} takes {dtypes} tensors on "
                f"{BACKENDS[backend].device}, not {x.dtype} on {x.device}; "
                f'use backend="{REFERENCE}", or None to choose by the tensor'
            )
        return backend
