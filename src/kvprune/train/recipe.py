"""A training run as a YAML file: model, text, method and settings."""

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

RECIPE = "recipe.yaml"  # in the folder of a run
PARTS = ("model", "start", "data", "method", "train")


# YAML 1.1 reads 1e-4 as a string and wants 1.0e-4 for the number; everybody writes 1e-4
_Loader: Any = type("_Loader", (yaml.SafeLoader,), {})
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclass(frozen=True)
class Recipe:
    """The input of `kvprune train`."""

    model: str
    data: DataConfig
    train: TrainConfig
    start: str | None = None  # folder of an earlier run, to continue with other settings

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


def make_recipe(given: dict[str, Any]) -> Recipe:
    """A recipe from plain values: {"model": …, "data": {…}, "method": {…}, "train": {…}}."""
    if unknown := sorted(set(given) - set(PARTS)):
        raise PruneError(
            f"{', '.join(unknown)}: no such part of a recipe; it has {', '.join(PARTS)}"
        )
    for part in ("data", "method", "train"):
        if not isinstance(given.get(part) or {}, dict):
            raise PruneError(
                f"{part} must contain settings, not {given[part]!r}; write name: value"
            )
    if not given.get("model"):
        raise PruneError("no model to train; pass a folder, a model on the hub, or tiny")
    data = dict(given.get("data") or {})
    if not data.get("sources"):
        raise PruneError("no text to train on; pass a file, a folder or a hub dataset with --data")
    known = {field.name for field in fields(DataConfig)}
    if unknown := sorted(set(data) - known):
        raise PruneError(
            f"{', '.join(unknown)}: no such data setting; there are {', '.join(sorted(known))}"
        )
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
    """The content of a file that `read_recipe` reads back."""
    text: str = yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True)
    return text


def read_recipe(path: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """The recipe in a file; `overrides` has the same structure and takes precedence."""
    return make_recipe(merge_settings(read_yaml(path), overrides or {}))


def read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        given = yaml.load(
            Path(path).read_text(encoding="utf-8"), _Loader
        )  # derived from SafeLoader
    except OSError as error:
        raise PruneError(f"cannot read the recipe {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PruneError(f"the recipe {path} is not YAML: {error}") from error
    if not isinstance(given, dict):
        raise PruneError(f"the recipe {path} contains no settings; it needs {', '.join(PARTS)}")
    return given


def merge_settings(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Both, part by part; overrides take precedence, and another method replaces all of it."""
    result = {**base}
    for part, value in overrides.items():
        old = base.get(part)
        if not isinstance(value, dict) or not isinstance(old, dict):
            result[part] = value
            continue
        changes_method = part == "method" and value.get("method") not in (None, old.get("method"))
        # settings of one method mean nothing to another
        result[part] = value if old and changes_method else {**old, **value}
    return result
