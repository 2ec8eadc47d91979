"""What the machine has: device, memory, instructions, threads, compiler, packages, models."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch

from kvprune.doctor.report import Fact
from kvprune.utils.amounts import size
from kvprune.utils.files import cache_folder
from kvprune.utils.memory import available
from kvprune.utils.openmp import CHOICES

PACKAGES = ("kvprune", "torch", "transformers", "numba", "llvmlite", "numpy", "triton")
# instructions that our kernels use, and what for
FEATURES = {
    "avx2": "vectors of 8 numbers",
    "avx512f": "vectors of 16 numbers",
    "avx512bf16": "products of bfloat16: attention of prompts, packed weights",
}
# for users; the others are for those who change kvprune
EXTRAS = ("train", "serve", "eval", "explain", "plot", "gguf")


def describe(device: torch.device) -> list[Fact]:
    facts = [Fact("system", f"{platform.system()} {platform.release()}, {platform.machine()}")]
    facts += [_cpu(), _memory(), *_features(), _threads(), _waiting()]
    facts.append(_gpu(device) if device.type == "cuda" else _other(device))
    return [*facts, _compiler(device)]


def versions() -> dict[str, str]:
    """Of Python and what kernels depend on; a missing package is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    for name, number in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if number:
            found[name] = number
    return found


def extras() -> list[Fact]:
    """Which of kvprune's extras are complete."""
    try:
        lines = requires("kvprune") or []
    except PackageNotFoundError:
        return []
    return [_extra(name, lines) for name in EXTRAS]


def models() -> list[Fact]:
    """Where weights are looked for, and which of the models with names are there."""
    from huggingface_hub import constants

    from kvprune.adapters.bases import BASES
    from kvprune.adapters.local import copies

    facts = [
        Fact("KVPRUNE_CACHE", *_folder(cache_folder())),
        Fact("HF_HUB_CACHE", *_folder(Path(constants.HF_HUB_CACHE))),
    ]
    for base in BASES.values():
        found = copies(base)
        where = f"{found[0].folder}" if found else "not here yet; fetched at its first use"
        facts.append(Fact(base.name, where, size(found[0].bytes) if found else ""))
    return facts


def _cpu() -> Fact:
    name, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((l.split(":")[1].strip() for l in lines if l.startswith("model name")), name)
    return Fact("CPU", name, f"{os.cpu_count()} cores")


def _memory() -> Fact:
    try:
        total = f"of {size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}"
    except (ValueError, OSError, AttributeError):
        total = ""
    return Fact("memory", f"{size(available())} free", total)


def _features() -> list[Fact]:
    import llvmlite.binding as llvm

    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    here = llvm.get_host_cpu_features()
    return [Fact(name, _yes(bool(here.get(name))), what, bool(here.get(name)))
            for name, what in FEATURES.items()]  # fmt: skip


def _threads() -> Fact:
    return Fact("threads", f"{torch.get_num_threads()}", "of torch and of Numba's kernels")


def _waiting() -> Fact:
    """How OpenMP's idle threads wait (docs/cost.md)."""
    chosen = [f"{name}={os.environ[name]}" for name in CHOICES if name in os.environ]
    if chosen:
        return Fact("idle threads", ", ".join(chosen), "set before torch was imported")
    note = "import kvprune before torch, or set GOMP_SPINCOUNT=1000"
    return Fact("idle threads", "OpenMP's default: they spin", note, False)


def _gpu(device: torch.device) -> Fact:
    about = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    kind = f"{about.major}.{about.minor}" if torch.version.hip is None else about.gcnArchName
    return Fact("GPU", f"{about.name} ({kind})", f"{size(free)} of {size(total)} free", True)


def _other(device: torch.device) -> Fact:
    if device.type != "cpu":
        return Fact("device", device.type, "no kernels for it: plain torch")
    if torch.version.cuda is None and torch.version.hip is None:
        return Fact("GPU", "none", "this torch is built for CPUs only")
    if torch.cuda.is_available():
        return Fact("GPU", torch.cuda.get_device_name(), "not asked about: --device cuda")
    return Fact("GPU", "none", "torch could use one, but finds none")


def _compiler(device: torch.device) -> Fact:
    from kvprune.utils.compiling import why_not

    reason = why_not(device.type)
    return Fact("--compile", "works" if not reason else "does not work", reason, not reason)


def _extra(name: str, lines: list[str]) -> Fact:
    missing = []
    for package in _packages(name, lines):
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(package)
    if not missing:
        return Fact(name, "installed", "", True)
    return Fact(name, f"without {', '.join(missing)}", f"pip install 'kvprune[{name}]'", False)


def _packages(extra: str, lines: list[str]) -> list[str]:
    """What an extra brings, from the installed package's own metadata."""
    names: list[str] = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        if not re.search(rf"extra == ['\"]{extra}['\"]", marker):
            continue
        own = re.match(r"kvprune\[([\w,-]+)\]", requirement)
        package = re.match(r"[\w.-]+", requirement)
        if own:
            names += [found for part in own[1].split(",") for found in _packages(part, lines)]
        elif package:
            names.append(package[0])
    return names


def _folder(path: Path) -> tuple[str, str]:
    return str(path), "" if path.is_dir() else "not there yet"


def _yes(here: bool) -> str:
    return "yes" if here else "no"
