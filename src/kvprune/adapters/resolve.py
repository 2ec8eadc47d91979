"""What a model's name stands for, in every function and command that takes one.

smollm2-135m-70         an adapter of the package and its base
smollm2-135m            the default adapter of this base
smollm2-135m-dense      the base without pruning
tiny                    the small dense model of the package
a folder of training    its adapter on the model that it was trained on, or its full model
another folder          a dense model
owner/name              a dense model on the hub
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import NamedTuple

from kvprune import tiny
from kvprune.adapters import source
from kvprune.adapters.bases import BASES, DENSE, find_base
from kvprune.adapters.registry import entries, find_adapter
from kvprune.adapters.saved_file import FILE, is_full_model, read_about
from kvprune.errors import PruneError

OWN = (tiny.NAME, *BASES)
# causal language models that the hub knows without an owner
HUB_WITHOUT_OWNER = (
    "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "openai-gpt", "ctrl",
    "xlnet-base-cased", "xlnet-large-cased", "transfo-xl-wt103",
)  # fmt: skip


class Location(NamedTuple):
    """Where the parts of a model are; `base` and `tokenizer`: ours, a folder or a hub name."""

    base: str
    tokenizer: str
    adapter: str | Path | None = None  # what to attach; None: dense
    fine_tuned_from: str | None = None  # if `base` is a full fine-tuned model


def resolve(name: str | Path, adapter: str | Path | None = None) -> Location:
    """Where a model's weights, tokenizer and adapter are; nothing is downloaded.

    `adapter`: to use instead of the one that the name stands for.
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
    if not folder.exists() and not _may_be_on_hub(str(name)):
        raise _unknown(str(name))
    return Location(str(name), str(name))


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
    if is_full_model(file.parent):
        return Location(folder, folder, folder, trained_on)
    has_tokenizer = (file.parent / "tokenizer_config.json").is_file()
    return Location(trained_on, folder if has_tokenizer else trained_on, folder)


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
    if not local.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(str(path))) / FILE
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise PruneError(
                f"{path} does not exist, neither as a folder nor on the hub: {reason}"
            ) from error
    return local


def _may_be_on_hub(name: str) -> bool:
    if "/" in name or name in HUB_WITHOUT_OWNER:
        return True
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _unknown(name: str) -> PruneError:
    dense = [base + DENSE for base in BASES]
    known = [*OWN, *dense, *(entry.name for entry in entries()), *HUB_WITHOUT_OWNER]
    near = difflib.get_close_matches(name, known)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return PruneError(
        f"cannot load the model {name!r}: {hint}pass a folder, a name on the hub as owner/name, "
        f"or a name that `kvprune models` lists"
    )
