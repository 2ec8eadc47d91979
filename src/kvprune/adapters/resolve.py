"""What a model's name stands for, in every function and command that takes one.

smollm2-135m-70         an adapter of the package and its base
smollm2-135m            the default adapter of this base
smollm2-135m-dense      the base without pruning
tiny                    the small dense model of the package
a folder of training    its adapter on the model that it was trained on, or its full model
another folder          a dense model
owner/name              on the hub: what training published, or a dense model
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NamedTuple

from kvprune import tiny
from kvprune.adapters import hub, source
from kvprune.adapters.bases import BASES, DENSE, find_base
from kvprune.adapters.registry import entries, find_adapter
from kvprune.adapters.saved_file import FILE, is_full_model, read_about
from kvprune.errors import PruneError

OWN = (tiny.NAME, *BASES)


class Location(NamedTuple):
    """Where the parts of a model are; `base` and `tokenizer`: ours, a folder or a hub name."""

    base: str
    tokenizer: str
    adapter: str | Path | None = None  # what to attach; None: dense
    fine_tuned_from: str | None = None  # if `base` is a full fine-tuned model


def resolve(name: str | Path, adapter: str | Path | None = None) -> Location:
    """Where a model's weights, tokenizer and adapter are; `adapter`: instead of the name's own.

    Only what training published on the hub is downloaded.
    """
    if adapter is not None:
        return resolve_base(name)._replace(adapter=adapter)
    if entry := find_adapter(str(name)):
        return Location(entry.base.name, entry.base.name, entry.name)
    folder = Path(name)
    if (folder / FILE).is_file():
        return resolve_file(folder / FILE)
    if (own := own_name(name)) is not None:
        return Location(own, own)
    if is_hub_name(name) and (file := _published(str(name))):
        return resolve_file(file)
    return Location(str(name), str(name))


def is_hub_name(name: str | Path) -> bool:
    """Whether only the hub can have it; a name that stands for nothing is refused."""
    if own_name(name) is not None or find_adapter(str(name)) or Path(name).exists():
        return False
    if not hub.may_hold(str(name)):
        raise _unknown(str(name))
    return True


def resolve_base(name: str | Path) -> Location:
    """The dense model under a name: an adapter's base, or a full fine-tuned model itself."""
    if (own := own_name(name)) is not None:
        return Location(own, own)
    location = resolve(name)
    return Location(location.base, location.tokenizer)


def resolve_file(file: Path) -> Location:
    """Where the parts of the model are that was saved with this file."""
    trained_on = read_about(file)["base"]["name"]
    folder = str(file.parent)
    tokenizer = folder if has_tokenizer(file.parent) else trained_on
    if is_full_model(file.parent):
        return Location(folder, tokenizer, folder, trained_on)
    return Location(trained_on, tokenizer, folder)


def has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


def own_name(name: str | Path) -> str | None:
    """The name of our own for this base, -dense removed; None: it is a folder or a hub name."""
    if str(name) == tiny.NAME:
        return tiny.NAME
    base = find_base(str(name))
    return base.name if base else None


def is_dense_name(name: str | Path) -> bool:
    """Whether the name means a base of our own without pruning."""
    return find_base(str(name)) is not None and str(name).endswith(DENSE)


def adapter_file(path: str | Path) -> Path:
    """The saved file: of an adapter of the package, in a folder, itself, or on the hub."""
    if entry := find_adapter(str(path)):
        source.warn_if_other_weights(entry)
        return entry.folder / FILE
    local = Path(path)
    if local.is_dir():
        return local / FILE
    if not local.exists() and hub.is_repository(str(path)):
        if (file := _published(str(path))) is not None:
            return file
        raise PruneError(f"{path} cannot be attached: {_why_not_published(str(path))}")
    return local


def check_adapter(path: str | Path) -> None:
    """Refuse what cannot be attached; of the hub's, what is neither there nor here."""
    local = Path(path)
    if find_adapter(str(path)):
        return
    if local.exists() or not hub.is_repository(str(path)):
        read_about(local / FILE if local.is_dir() else local)
    elif hub.find_file(str(path), FILE) is None:
        raise PruneError(f"{path} cannot be attached: {_why_not_published(str(path))}")


def _published(name: str) -> Path | None:
    """The saved file in a repository on the hub, with all files beside it; None without one."""
    if not hub.is_repository(name) or hub.find_file(name, FILE) is None:
        return None
    return hub.fetch(name) / FILE


def _why_not_published(name: str) -> str:
    return hub.away() if hub.unreachable() else f"it is no folder, and has no {FILE} on the hub"


def _unknown(name: str) -> PruneError:
    dense = [base + DENSE for base in BASES]
    known = [*OWN, *dense, *(entry.name for entry in entries()), *hub.WITHOUT_OWNER]
    near = difflib.get_close_matches(name.lower(), known)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    if "/" in name:
        hint = "this folder does not exist; "
    return PruneError(
        f"cannot load the model {name!r}: {hint}pass a folder, a name on the hub as owner/name, "
        f"or a name that `kvprune models` lists"
    )
