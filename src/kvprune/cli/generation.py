"""What `chat` and `generate` share: their options, how they load a model, how they report sizes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvprune.errors import PruneError
from kvprune.utils.parse import in_bytes

if TYPE_CHECKING:
    from kvprune.adapters.load import Loaded

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV = ("int8",)


def _check_top_p(top_p: float) -> float:
    if not top_p:
        raise PruneError("--top-p 0 leaves no token to sample; give a share up to 1")
    return top_p


def _check_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise PruneError(f"--dtype {dtype} is unknown; use one of {', '.join(DTYPES)}")
    return dtype


def _check_kv(kv: str | None) -> str | None:
    if kv not in (None, *KV):
        raise PruneError(f"--kv {kv} is unknown; use {', '.join(KV)}, or leave it out")
    return kv


def _check_budget(size: str | None) -> str | None:
    if size is not None:
        in_bytes(size, "--kv-budget")
    return size


System = Annotated[str, typer.Option(help="System message.")]
Temperature = Annotated[float, typer.Option(help="Of sampling; 0: greedy.", min=0)]
TopP = Annotated[
    float, typer.Option(help="Nucleus of sampling.", min=0, max=1, callback=_check_top_p)
]
Seed = Annotated[int, typer.Option(help="Seed for sampling.")]
Threshold = Annotated[
    float | None, typer.Option(help="Higher prunes more.", show_default="as trained")
]
ProtectFirst = Annotated[
    int | None, typer.Option(help="Number of first tokens that are never dropped.", min=0)
]
ProtectRecent = Annotated[
    int | None, typer.Option(help="Number of latest tokens that are not dropped yet.", min=0)
]
TemplateFile = Annotated[
    Path | None, typer.Option(help="A Jinja file, for a model without a chat template.")
]
Dtype = Annotated[
    str, typer.Option(help=f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}.", callback=_check_dtype)
]
Kv = Annotated[
    str | None,
    typer.Option(
        help="int8: keys and values in a byte each.",
        show_default="the model's dtype",
        callback=_check_kv,
    ),
]
KvBudget = Annotated[
    str | None,
    typer.Option(
        help="The most bytes that the cache may take, such as 512MB.",
        metavar="SIZE",
        callback=_check_budget,
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the model first: a minute at the start, faster answers. Needs a C++ compiler "
        "or a GPU.",
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, ...", show_default="cuda if there is one")
]


def can_compile(loaded: Loaded, wanted: bool) -> bool:
    """Whether to compile; if it is wanted and impossible, a line on stderr says why."""
    if not wanted:
        return False
    from kvprune.integration.handle import Pruned
    from kvprune.utils.compiling import why_not

    if not isinstance(loaded.model, Pruned):
        raise PruneError("--compile needs a pruned model; leave it out for a dense one")
    reason = why_not(loaded.model.device.type)
    if reason:
        print(f"kvprune: not compiled: {reason}", file=sys.stderr)
    return not reason


def check_file(file: Path | None) -> Path | None:
    """Refuse at once a file that is not there: a model takes seconds to load."""
    if file is not None and not file.is_file():
        raise PruneError(f"there is no file {file}; give one that was saved before")
    return file


def check_folder(file: Path | None) -> Path | None:
    """The same for a file that cannot be written."""
    if file is not None and not file.parent.is_dir():
        raise PruneError(
            f"there is no folder {file.parent}; create it, or give a file in one that exists"
        )
    if file is not None and file.is_dir():
        raise PruneError(f"{file} is a folder; give the name of a file in it")
    return file


def sizes(cache: int, dense: int) -> str:
    """The size of a cache next to that of a dense one."""
    text = f"cache {cache / 2**20:.2f} MiB, dense {dense / 2**20:.2f} MiB"
    if cache > dense:
        text += " (more: each token also has an interaction key, and some slots are free)"
    return text
