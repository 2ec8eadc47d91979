"""Perplexity of a model on a text, both by name; results are stored in a folder, and resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvprune.adapters.load import Loaded, load_with_tokenizer
from kvprune.config import to_dict
from kvprune.errors import PruneError
from kvprune.evaluate.dense import dense_reference, identity
from kvprune.evaluate.perplexity.figure import draw
from kvprune.evaluate.perplexity.measure import AtContext, perplexity
from kvprune.evaluate.points import Points
from kvprune.integration.handle import Pruned
from kvprune.integration.host import max_positions
from kvprune.text.config import DataConfig
from kvprune.text.held_out import held_out_tokens, share
from kvprune.text.tokens import tokenise
from kvprune.text.windows import Windows, cut
from kvprune.train.recipe import RECIPE, read_recipe
from kvprune.utils import plot
from kvprune.utils.files import write_atomically
from kvprune.utils.processes import ALONE, Group
from kvprune.version import __version__

# the paper's length; many models could read more, at a cost that grows faster than the text
LENGTH = 1024
NAME = "perplexity"
Dense = PreTrainedModel | Literal["open"] | None


@dataclass(frozen=True)
class Measured:
    """The rows, and how they were measured."""

    about: dict[str, Any]
    rows: list[AtContext]

    def to_dict(self) -> dict[str, Any]:
        return {"about": self.about, "rows": [row.to_dict() for row in self.rows]}


def run(
    model: str,
    data: str | None = None,
    *,
    held_out: str | None = None,
    max_tokens: int | None = None,
    adapter: str | None = None,
    length: int | None = None,
    stride: int | None = None,
    contexts: Sequence[int] | None = None,
    max_windows: int | None = None,
    dense: bool = True,
    dense_model: str | None = None,
    path: str = "full",
    chunk: int = 64,
    batch: int = 4,
    text_field: str = "text",
    dtype: str = "auto",
    device: str | None = None,
    out: str | Path | None = None,
    group: Group = ALONE,
) -> Measured:
    """Load, cut, measure; `out` gets perplexity.json, .png and .svg, and .points.json on the way.

    The points are the sums of each batch. An interrupted run resumes after them; with other
    weights, another text or other settings it refuses to. Processes of a `group` share the
    windows, and all return the same.

    `held_out` is the folder or recipe of a run, to read what it held out; or what its held_out was,
    to read the same part of `data`.
    """
    if (data is None) == (held_out is None or share(held_out) is not None):
        raise PruneError(
            "pass a text with --data, or the folder of a run with --held-out to read what it held "
            "out of training"
        )
    if out is not None:
        plot.need_matplotlib()

    def prepare() -> tuple[Loaded, Tensor, Windows, Dense, int]:
        loaded = load_with_tokenizer(model, adapter, dtype, device)
        limit = max_positions(loaded.host)
        tokens = min(limit or LENGTH, LENGTH) if length is None else length
        if limit is not None and tokens > limit:
            raise PruneError(
                f"windows of {tokens} tokens do not fit into the {limit} positions of {model}; "
                f"lower --length"
            )
        source = TextSource(data, text_field, held_out, max_tokens)
        ids = _text(loaded, source, tokens, stride, max_windows)
        reference = dense_reference(loaded, dense_model, dtype, device) if dense else None
        return loaded, ids, cut(ids, tokens, stride, max_windows), reference, tokens

    loaded, ids, windows, reference, length = group.together(prepare)
    about = {
        "model": model,
        "adapter": adapter,
        "method": to_dict(loaded.model.config) if isinstance(loaded.model, Pruned) else None,
        "weights": identity(loaded.host),
        "dense": reference if not isinstance(reference, torch.nn.Module) else identity(reference),
        "data": data or held_out,
        **({} if held_out is None else {"held_out": held_out, "max_tokens": max_tokens}),
        "length": length,
        "stride": stride,
        "contexts": None if contexts is None else sorted(set(contexts)),
        "path": path,
        "version": __version__,
    }
    group.agree(lambda: {**about, "text": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]})
    folder = None if out is None else Path(out)
    points = None if folder is None else Points(folder / f"{NAME}.points.json", about, group)
    rows = perplexity(
        loaded.model, windows, contexts, dense=reference, path=path, chunk=chunk, batch=batch,
        points=points, group=group,
    )  # fmt: skip
    measured = Measured({**about, "windows": len(windows)}, rows)
    if folder is not None and group.is_main:
        text = json.dumps(measured.to_dict(), indent=1, ensure_ascii=False)
        write_atomically(folder / f"{NAME}.json", text.encode())
        plot.save(draw(rows, adapter or model), folder / NAME)
    return measured


@dataclass(frozen=True)
class TextSource:
    """A text by name, and which part of it."""

    data: str | None
    field: str
    held_out: str | None
    max_tokens: int | None

    def recipe(self, length: int) -> DataConfig:
        """What is held out, as training describes it."""
        assert self.held_out is not None
        part = share(self.held_out)
        if part is None:
            file = Path(self.held_out)
            return read_recipe(file / RECIPE if file.is_dir() else file).data
        assert self.data is not None
        return DataConfig(
            (self.data,), length, held_out=part, text_field=self.field, max_tokens=self.max_tokens
        )


def _text(
    loaded: Loaded, source: TextSource, length: int, stride: int | None, max_windows: int | None
) -> Tensor:
    """The tokens of the source, or as many as the windows need."""
    need = None if max_windows is None else (max_windows - 1) * (stride or length) + length + 1
    if source.held_out is not None:
        ids = held_out_tokens(source.recipe(length), loaded.tokenizer)[:need]
    else:
        most = min((n for n in (need, source.max_tokens) if n is not None), default=None)
        tokens = tokenise(
            (str(source.data),), loaded.tokenizer, text_field=source.field, max_tokens=most
        )
        ids = torch.from_numpy(tokens.ids.astype("int64"))
    if len(ids) < length:
        raise PruneError(
            f"{source.data or source.held_out} has {len(ids)} tokens, fewer than the {length} of "
            f"one window; lower --length or add text"
        )
    return ids
