"""A model that is ready to answer: loaded, made fast, its kernels compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvprune.errors import PruneError
from kvprune.utils.malloc import keep_memory
from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    _import(tell)
    from kvprune.adapters.load import load_with_tokenizer
    from kvprune.integration.handle import Pruned

    tell(f"loading {model}")
    loaded = load_with_tokenizer(model, adapter, dtype, device, merge=True)
    if jinja is not None:
        loaded.tokenizer.chat_template = jinja
    if chosen:
        if not isinstance(loaded.model, Pruned):
            raise PruneError(f"{model} is dense: there is no {next(iter(chosen))} to set")
        loaded.model.adjust(**chosen)
    _make_fast(loaded.host)
    if isinstance(loaded.model, Pruned):
        _load_kernels(loaded.model, tell, kv)
    return loaded


def load_served(
    models: Sequence[str],
    adapter: str | None,
    dtype: str,
    device: str | None,
    template: Path | None,
    tell: Callable[[str], None],
    kv: str | None = None,
    **settings: float | int | None,
) -> dict[str, Pruned]:
    """Models by the names that clients see: one, or several over one copy of their base."""
    if len(models) == 1:
        loaded = load_ready(models[0], adapter, dtype, device, template, tell, kv, **settings)
        pruned = loaded.attached()
        pruned.tokenizer = loaded.tokenizer  # with the template that was given
        return {served_name(models[0]): pruned}
    given = {"adapter": adapter, **settings}
    if wrong := [option for option, value in given.items() if value is not None]:
        raise PruneError(
            f"{wrong[0]} is for one model, and {len(models)} are named; a request can set its own "
            f"threshold and protect_recent"
        )
    names = [served_name(model) for model in models]
    if len(set(names)) < len(names):
        raise PruneError(
            f"of {', '.join(models)} two have the same name, by which clients would choose; name "
            f"each once, or rename a folder"
        )
    jinja = None if template is None else _read(template)
    _import(tell)
    from kvprune.adapters.strengths import load_strengths

    tell(f"loading {', '.join(names)}")
    # before LoRA goes beside the weights: the layers that it is added to must be the fast ones
    loaded_all = load_strengths(models, dtype, device, _make_fast)
    first = loaded_all[models[0]]
    if jinja is not None:
        first.tokenizer.chat_template = jinja  # that of all
    _load_kernels(first, tell, kv)
    return dict(zip(names, loaded_all.values(), strict=True))


def _import(tell: Callable[[str], None]) -> None:
    tell("importing torch")
    import_module("torch")

    tell("importing transformers")
    import_module("transformers")

    quiet()
    keep_memory()  # or every layer of a long prompt would request its memory again


def _make_fast(model: PreTrainedModel) -> None:
    from kvprune.integration.few_rows import speed_up
    from kvprune.integration.fused import fuse

    speed_up(model)
    fuse(model)


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
