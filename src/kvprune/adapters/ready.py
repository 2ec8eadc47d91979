"""A model that is ready to answer: loaded, made fast, its kernels compiled."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvprune.errors import PruneError
from kvprune.utils.malloc import keep_memory
from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from kvprune.adapters.load import Loaded
    from kvprune.integration.handle import Pruned


def load_ready(
    model: str,
    adapter: str | None,
    dtype: str,
    device: str | None,
    template: Path | None,
    tell: Callable[[str], None],
    kv: str | None = None,
    **settings: float | int | None,
) -> Loaded:
    """The model and its tokenizer, with these settings and this template; `tell` gets each step."""
    chosen = {name: value for name, value in settings.items() if value is not None}
    jinja = None if template is None else _read(template)

    tell("importing torch")
    import_module("torch")

    tell("importing transformers")
    from kvprune.adapters.load import load_with_tokenizer
    from kvprune.integration.few_rows import speed_up
    from kvprune.integration.fused import fuse
    from kvprune.integration.handle import Pruned

    quiet()
    keep_memory()  # or every layer of a long prompt would request its memory again
    tell(f"loading {model}")
    loaded = load_with_tokenizer(model, adapter, dtype, device, merge=True)
    if jinja is not None:
        loaded.tokenizer.chat_template = jinja
    if chosen:
        if not isinstance(loaded.model, Pruned):
            raise PruneError(f"{model} is dense: there is no {next(iter(chosen))} to set")
        loaded.model.adjust(**chosen)
    host = loaded.model.model if isinstance(loaded.model, Pruned) else loaded.model
    speed_up(host)
    fuse(host)
    if isinstance(loaded.model, Pruned):
        _load_kernels(loaded.model, tell, kv)
    return loaded


def served_name(model: str) -> str:
    """As clients call it: of a folder its last part, not where it lies on this machine."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def _load_kernels(pruned: Pruned, tell: Callable[[str], None], kv: str | None) -> None:
    """Decode a token, so that no answer is interrupted, nor its speed measured, by a compiler."""
    import torch

    from kvprune.cache.pruned_cache import PrunedCache
    from kvprune.ops.jit import on_compile

    tell("loading the kernels")
    with on_compile(lambda: tell("compiling the kernels for this machine, once")), torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long, device=pruned.model.device)
        pruned.model(input_ids=token, past_key_values=PrunedCache(pruned, kv=kv), use_cache=True)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PruneError(f"cannot read the template {file}: {error}") from error
