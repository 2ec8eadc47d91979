"""A hub without a network: its cache in a folder of the test, the hub itself there or away."""

import shutil
from pathlib import Path
from types import SimpleNamespace

from kvprune.adapters import hub

COMMIT = "0" * 40


def away(monkeypatch, path: Path) -> None:
    """From now on the hub cannot be reached, and its cache is an empty folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(path / "hub"))
    monkeypatch.setattr(hub, "_answer", None)
    monkeypatch.setattr(hub, "_ask", lambda: "no network")


def keep(path: Path, name: str, folder: Path) -> Path:
    """Put a copy of the repository into the cache, as an earlier download would have."""
    place = path / "hub" / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(folder, place / "snapshots" / COMMIT))


def publish(monkeypatch, repositories: dict[str, Path]) -> list[str]:
    """From now on the hub is there and holds these; returns a list of what will be fetched."""
    from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

    response = SimpleNamespace(headers={}, request=None)
    fetched: list[str] = []

    def download(name, file):
        if name not in repositories:
            raise RepositoryNotFoundError("404: no such repository", response=response)
        if not (repositories[name] / file).is_file():
            raise RemoteEntryNotFoundError(f"404: no {file}", response=response)
        fetched.append(f"{name} {file}")
        return str(repositories[name] / file)

    def snapshot(name, local_files_only=False):
        fetched.append(name)
        return str(repositories[name])

    monkeypatch.setattr(hub, "_answer", None)
    monkeypatch.setattr(hub, "_ask", lambda: "")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return fetched
