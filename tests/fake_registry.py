"""A tiny base registered as `little`, and adapters of it."""

import json
from pathlib import Path

import kvprune
import model_folders
import zoo
from helpers import uneven_gates
from kvprune.adapters import registry, wheel
from kvprune.adapters.bases import BASES, Base, Wheel
from kvprune.adapters.packing import pack
from kvprune.adapters.registry import About

LITTLE = Base(
    name="little",
    hub="nobody/little-instruct",
    licence="MIT",
    wheel=Wheel("little-gguf", "1.0", "0" * 64, "little_gguf/little.gguf"),
)


def about(strength: float, **changes) -> About:
    known = {"base": "little", "source": "wheel", "sparsity": 0.41, "perplexity_ratio": 1.02}
    return About(strength=strength, **known | changes)


def register(monkeypatch, path: Path) -> Path:
    """Register the base and store it in the cache; returns the empty folder of its adapters."""
    monkeypatch.setenv("KVPRUNE_CACHE", str(path / "cache"))
    monkeypatch.delenv("KVPRUNE_SOURCE", raising=False)
    monkeypatch.setitem(BASES, LITTLE.name, LITTLE)
    monkeypatch.setattr(registry, "FOLDER", path / "adapters")
    place = wheel.model_folder(LITTLE.wheel)
    zoo.make("llama", vocab_size=257, max_position_embeddings=200).save_pretrained(place)
    model_folders.byte_tokenizer().save_pretrained(place)
    return path / "adapters"


def trained(path: Path, seed: int = 0) -> Path:
    """The output of training: an adapter in float32 that records a path, and a card."""
    model = zoo.make("llama", vocab_size=257, max_position_embeddings=200)
    model.config.name_or_path = "/home/somebody/little"
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
    uneven_gates(pruned, seed)
    pruned.save(path)
    (path / "README.md").write_text("# A card\n")
    return path


def packed(path: Path, name: str, seed: int = 0, **changes):
    return pack(trained(path / f"run {name}", seed), name, about(0.5, **changes))


def written(folder: Path, **values) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / registry.ABOUT).write_text(json.dumps(values))
