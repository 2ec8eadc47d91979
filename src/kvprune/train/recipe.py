"""A run as a file: which model, which text, which settings; YAML, with a word to override it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from kvprune.config import METHODS, from_dict
from kvprune.errors import PruneError
from kvprune.text.config import DataConfig
from kvprune.train.config import TrainConfig

PARTS = ("model", "start", "data", "method", "train")


# YAML 1.1 reads 1e-4 as a string and wants 1.0e-4 for the number; everybody writes 1e-4
_Loader: Any = type("_Loader", (yaml.SafeLoader,), {})
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclass(frozen=True)
class Recipe:
    """All that `kvprune train` needs to know."""

    model: str
    data: DataConfig
    train: TrainConfig
    start: str | None = None  # what an earlier run saved, to go on from with other settings

    def to_dict(self) -> dict[str, Any]:
        train = self.train.to_dict()
        data = asdict(self.data)
        method = train.pop("method")
        return {
            "model": self.model,
            **({} if self.start is None else {"start": self.start}),
            "data": {**data, "sources": list(data["sources"])},
            "method": method,
            "train": train,
        }


def make(given: dict[str, Any]) -> Recipe:
    """A recipe from plain values: {"model", "data": {}, "method": {}, "train": {}}."""
    if unknown := sorted(set(given) - set(PARTS)):
        raise PruneError(f"{', '.join(unknown)}: no such part of a recipe; it has {PARTS}")
    for part in ("data", "method", "train"):
        if not isinstance(given.get(part) or {}, dict):
            raise PruneError(f"{part} holds no settings but {given[part]!r}; write name: value")
    if not given.get("model"):
        raise PruneError("no model to train; name a folder, a model on the hub, or tiny")
    data = dict(given.get("data") or {})
    if not data.get("sources"):
        raise PruneError("no text to train on; name a file, a folder or a hub dataset with --data")
    known = {field.name for field in fields(DataConfig)}
    if unknown := sorted(set(data) - known):
        raise PruneError(f"{', '.join(unknown)}: no such setting of data; it has {sorted(known)}")
    method = {"method": "pruning", **(given.get("method") or {})}
    if method["method"] in METHODS:
        needed = METHODS[method["method"]].__dataclass_fields__
        for name in ("window", "stride"):
            if name in needed and name not in method:
                raise PruneError(f"method {method['method']} needs --{name}")
    train = TrainConfig.from_dict({**(given.get("train") or {}), "method": from_dict(method)})
    start = given.get("start")
    return Recipe(str(given["model"]), DataConfig(**data), train, start and str(start))


def to_yaml(recipe: Recipe) -> str:
    """The file that `read` reads back."""
    text: str = yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True)
    return text


def read(path: str | Path, over: dict[str, Any] | None = None) -> Recipe:
    """The recipe in a file; what `over` holds, shaped the same, goes before what it says."""
    return make(merged(load(path), over or {}))


def load(path: str | Path) -> dict[str, Any]:
    try:
        given = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)  # a safe one
    except OSError as error:
        raise PruneError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PruneError(f"the recipe {path} is not YAML: {error}") from error
    if not isinstance(given, dict):
        raise PruneError(f"the recipe {path} holds no settings; it needs {', '.join(PARTS)}")
    return given


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, part by part; a setting of `above` goes first, another method replaces all of it."""
    made = {**below}
    for part, value in above.items():
        old = below.get(part)
        changes_method = (
            part == "method" and old and value.get("method") not in (None, old.get("method"))
        )
        merge = isinstance(value, dict) and isinstance(old, dict) and not changes_method
        made[part] = {**old, **value} if merge else value  # type: ignore[dict-item]
    return made
