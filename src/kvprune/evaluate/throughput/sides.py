"""Who competes in a measurement of speed, each with a cache in the middle of a text."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvprune import tiny
from kvprune.adapters import lora
from kvprune.adapters.load import load
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.adapters.resolve import resolve
from kvprune.cache.pruned_cache import PrunedCache
from kvprune.errors import PruneError
from kvprune.evaluate.throughput.decoding import dense_cache, filled_cache, steady_votes, twin
from kvprune.integration.handle import Pruned, attach
from kvprune.methods import METHODS
from kvprune.methods.base import Method
from kvprune.methods.learned import PruningConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# every method that can be given a size, and needs no training of its own
BASELINES = ("local", "strided", "streaming", "tova", "h2o", "snapkv", "keynorm")


@dataclass(frozen=True)
class Side:
    """A model and how to make its cache after `context` tokens: make(batch, context, room)."""

    name: str
    method: str
    model: PreTrainedModel
    make: Callable[[int, int, int], Cache]


@dataclass(frozen=True)
class Loaded:
    """A dense model, the same with pruning attached if it was trained, and text to read."""

    plain: PreTrainedModel
    pruned: Pruned | None
    text: Tensor | None  # (tokens,)

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.plain.parameters())


def load_sides(
    name: str,
    adapter: str | None = None,
    text: Path | None = None,
    dtype: str = "auto",
    random: bool = False,
) -> Loaded:
    """The model by name; `random`: its shape with random weights, nothing is downloaded."""
    if random:
        if adapter is not None:
            raise PruneError("random weights have no adapter; leave out --adapter or --random")
        return Loaded(_random_model(name, dtype), None, None)
    place = resolve(name, adapter)
    plain = load_base(place.base, dtype)
    if place.adapter is None:
        return Loaded(plain, None, None)
    # LoRA is merged into the weights, which must then not be the plain model's
    folder = Path(place.adapter)
    shares = folder.is_dir() and not lora.is_saved_in(folder)
    model = twin(plain) if shares else load_base(place.base, dtype)
    pruned = load(model, place.adapter, merge=True)
    pruned.model.eval()
    return Loaded(plain, pruned, _tokens(place.tokenizer, text or tiny.text_file("held_out")))


def realistic(loaded: Loaded, static: bool = False) -> list[Side]:
    """Dense, and the model's own decisions on real text: rows and layers hold what they will."""
    sides = _dense(loaded.plain, static)
    if (pruned := loaded.pruned) is not None:
        assert loaded.text is not None
        text = loaded.text

        def read(batch: int, context: int, room: int) -> Cache:
            cache = PrunedCache(pruned)
            with torch.inference_mode():
                ids = rows_of(text, batch, context).to(pruned.model.device)
                pruned.model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            return cache

        sides.append(Side("pruned", pruned.config.method, pruned.model, read))
    return sides


def ideal(
    loaded: Loaded,
    context: int,
    sparsity: float,
    baselines: tuple[str, ...] = (),
    static: bool = False,
    rank: int = 64,
) -> list[Side]:
    """Dense, and every other side with (1 − sparsity) · context tokens in each row and layer."""
    kept = max(1, round((1 - sparsity) * context))
    rank = rank if loaded.pruned is None else loaded.pruned.rank or rank
    configs: list[Method] = [PruningConfig(rank=rank)]
    configs += [budgeted(name, kept, context) for name in baselines]
    sides = _dense(loaded.plain, static)
    for config in configs:
        pruned = attach(twin(loaded.plain), config)
        if config.learns:
            vocabulary = loaded.plain.config.get_text_config().vocab_size
            ids = torch.randint(vocabulary, (1, min(64, context)))
            steady_votes(pruned, ids.to(loaded.plain.device), kept)
        name = "pruned" if config.learns else config.method
        sides.append(Side(name, config.method, pruned.model, _filler(pruned, kept)))
    return sides


def budgeted(name: str, kept: int, context: int) -> Method:
    """A baseline that holds about `kept` tokens after `context`."""
    if name not in BASELINES:
        raise PruneError(f"baseline {name!r} is unknown; choose from {', '.join(BASELINES)}")
    return METHODS[name].with_budget(kept, context)


def rows_of(text: Tensor, batch: int, length: int) -> Tensor:
    """So many stretches of the text, (batch, length), evenly spread over it."""
    if len(text) < length:
        raise PruneError(
            f"the text has {len(text)} tokens, but the context is to be {length}; pass a longer "
            f"--text or a shorter --context"
        )
    starts = [(len(text) - length) * row // max(batch - 1, 1) for row in range(batch)]
    return torch.stack([text[start : start + length] for start in starts])


def _dense(plain: PreTrainedModel, static: bool) -> list[Side]:
    def side(name: str, kind: str) -> Side:
        return Side(name, "dense", plain, lambda b, n, room: dense_cache(kind, plain, b, n, room))

    return [side("dense", "dynamic")] + ([side("dense, static", "static")] if static else [])


def _filler(pruned: Pruned, kept: int) -> Callable[[int, int, int], Cache]:
    """Rows that all hold `kept` tokens; those of a fixed pattern hold what the pattern leaves."""
    config, layers = pruned.config, len(pruned.layers)

    def fill(batch: int, context: int, room: int) -> Cache:
        token = config.held(context, kept)
        return filled_cache(pruned, context, torch.full((layers, batch), len(token)), token)

    return fill


def _random_model(name: str, dtype: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    from kvprune.evaluate.cost.shape import load_config

    config = load_config(name)
    wanted = getattr(torch, dtype) if dtype != "auto" else config.dtype or torch.float32
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=wanted)
    return model.eval()


def _tokens(name: str, file: Path) -> Tensor:
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PruneError(f"cannot read text from {file}: {error}") from error
    ids = load_tokenizer(name)(text, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)
