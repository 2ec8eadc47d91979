"""The Hugging Face hub: which names may be on it, whether it can be reached, what it holds."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kvprune.errors import PruneError

# causal language models that the hub knows without an owner
WITHOUT_OWNER = (
    "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "openai-gpt", "ctrl",
    "xlnet-base-cased", "xlnet-large-cased", "transfo-xl-wt103",
)  # fmt: skip
PATIENCE = 5.0  # seconds to wait for the hub's answer
REMEMBERED = 60.0  # seconds until it is asked again

_answer: tuple[float, str] | None = None  # when it was asked, and why it did not answer


def may_hold(name: str) -> bool:
    """Whether a model of this name may be on the hub; it is not contacted."""
    if is_repository(name) or name in WITHOUT_OWNER:
        return True
    return _is_valid(name) and local_copy(name, "config.json") is not None


def is_repository(name: str) -> bool:
    """Whether it has the form owner/name."""
    return "/" in name and _is_valid(name)


def _is_valid(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def unreachable() -> str:
    """Why the hub cannot be reached; empty if it can.

    One request: transformers and huggingface_hub try again for each file, and without a network
    that takes minutes.
    """
    global _answer
    if _answer is None or time.monotonic() - _answer[0] > REMEMBERED:
        _answer = time.monotonic(), _ask()
    return _answer[1]


def local_copy(name: str, file: str) -> Path | None:
    """The folder in the hub's cache that holds this file of the repository; None if none does."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file)
    return Path(found).parent if isinstance(found, str) else None


def away() -> str:
    """Why a name cannot be read while the hub is away."""
    from huggingface_hub import constants

    return (
        f"it is no folder, this machine has no copy of it from the hub, and {constants.ENDPOINT} "
        f"cannot be reached ({unreachable()})"
    )


def find_file(name: str, file: str) -> Path | None:
    """A file of a repository, fetched if necessary; None if there is none, or no such repository.

    While the hub is away, that of the copy on this machine.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if unreachable():
        copy = local_copy(name, file)
        return None if copy is None else copy / file
    try:
        return Path(hf_hub_download(name, file))
    except (RemoteEntryNotFoundError, RepositoryNotFoundError):
        return None
    # anything else is no answer: a pruned model must not pass for a dense one
    except (LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PruneError(f"cannot read {name} from the hub: {reason}; try again") from error


def fetch(name: str) -> Path:
    """The whole repository in the hub's cache."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, local_files_only=bool(unreachable())))


def _ask() -> str:
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    reason = [f"no answer in {PATIENCE:.0f} seconds"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
            reason[0] = ""
        # the libraries under huggingface_hub raise many types
        except Exception as error:
            reason[0] = str(error).strip() or type(error).__name__

    # the limit of a request does not include the search for its address
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return reason[0]
