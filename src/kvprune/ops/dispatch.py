"""Which implementation of an operation runs: one table of backends for all operations."""

from __future__ import annotations

import os
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
# fastest first; the reference, plain torch, runs on every device. To torch, ROCm is "cuda" too
BACKENDS = {
    "cpu": Backend(device="cpu", package="numba"),
    "triton": Backend(device="cuda", package="triton"),
}

# the oldest NVIDIA devices that Triton's kernels are compiled for in the tests
OLDEST_CUDA = (8, 0)


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter: on CPU tensors, exactly, and slowly.

    Triton reads the variable when it is imported.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


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

    def available(self, exclude: str | Collection[str] = (), device: str = "cpu") -> list[str]:
        """The backends that can run here, on tensors of this type of device."""
        excluded = {exclude} if isinstance(exclude, str) else set(exclude)
        here = [name for name in self.dtypes if installed(name) and device in devices(name)]
        return [name for name in (REFERENCE, *here) if name not in excluded]

    def best_backend(self, x: Tensor) -> str:
        """The fastest backend for tensors like x."""
        fits = (name for name in BACKENDS if self.refusal(name, x) is None)
        # an interpreter is only for those who ask for it
        return next((name for name in fits if BACKENDS[name].device == x.device.type), REFERENCE)

    def refusal(self, backend: str, x: Tensor) -> str | None:
        """Why a backend cannot take tensors like x; None if it can."""
        if backend == REFERENCE:
            return None
        if backend not in self.dtypes:
            return f"{self.name} has no backend {backend!r} here"
        if not installed(backend):
            return f"the {backend} backend of {self.name} needs {BACKENDS[backend].package}"
        if x.dtype not in self.dtypes[backend] or x.device.type not in devices(backend):
            taken = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes[backend])
            where = " or ".join(devices(backend))
            return (
                f"the {backend} backend of {self.name} takes {taken} tensors on {where}, not "
                f"{x.dtype} on {x.device}"
            )
        if backend == "triton" and x.is_cuda and too_old(x.device):
            oldest = ".".join(map(str, OLDEST_CUDA))
            return f"Triton's kernels need compute capability {oldest}, which {x.device} has not"
        return None

    def _checked(self, backend: str, x: Tensor) -> str:
        if refusal := self.refusal(backend, x):
            others = ", ".join(self.available(device=x.device.type))
            hint = ""
            if backend == "triton" and x.device.type == "cpu" and not interpreted():
                hint = (
                    "; on CPU tensors it runs where TRITON_INTERPRET=1 is set before Python starts"
                )
            raise PruneError(
                f"{refusal}{hint}; use one of {others}, or None to choose by the tensor"
            )
        return backend


def installed(backend: str) -> bool:
    return find_spec(BACKENDS[backend].package) is not None


def devices(backend: str) -> list[str]:
    """The types of device on which a backend runs."""
    own = BACKENDS[backend].device
    return [own, "cpu"] if backend == "triton" and interpreted() else [own]


def too_old(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST_CUDA
