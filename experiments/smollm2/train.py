"""Every strength of the pruned SmolLM2, one after another: train, pack, plot the curves.

    python -m experiments.smollm2.train [--pack]

Run text.py first. The first stage starts from the dense model, by the recipe; each other one from
an earlier stage, with another γ; what is shipped is the mean of some. It resumes where it stopped,
also in the middle of a run.
--pack copies the adapters into the package, with the measurements of quality.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from experiments.publish import DOCS, publish, save_figure
from experiments.smollm2.average import average
from experiments.smollm2.card import card
from experiments.smollm2.common import DENSE, OURS, Row
from kvprune.adapters.packing import pack
from kvprune.adapters.registry import About
from kvprune.errors import PruneError
from kvprune.train.recipe import make_recipe, merge_settings, read_yaml
from kvprune.train.run import run
from kvprune.utils import plot as drawing
from kvprune.utils.files import write_atomically
from kvprune.utils.malloc import keep_memory

BASE = "smollm2-135m"
RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2-135m.yaml"


def later(start: str, seed: int, length: int = 1024, **train: Any) -> dict[str, Any]:
    """A stage that starts from another, with LoRA at three times the recipe's rate."""
    data = {"seed": seed, "length": length}
    return {"start": start, "data": data, "train": {"base_lr": 1e-3, "seed": seed, **train}}


# name: differences from the recipe, or the mean of others; a number is a strength, in % of 1,024
# tokens
STAGES: dict[str, dict[str, Any]] = {
    "first": {"train": {"gamma": 0.3}},
    "weak": later("first", 1, gamma=0.1, alpha_start=3.0, steps=120),
    "strong": later("weak", 2, gamma=0.25, alpha_start=3.0, steps=120),
    # longer rows: tokens far back count for more
    "long": later("strong", 3, length=2048, gamma=0.2, alpha_start=4.0, steps=110, warmup=5),
    "more": later("long", 4, length=2048, gamma=0.25, alpha_start=5.0, steps=45, warmup=3),
    "70": {"mean_of": ("weak", "long")},
    "80": {"mean_of": ("strong", "long", "more")},
}
DEFAULT = "70"
# rows of quality.py: by context, and at 1,024 tokens over more text, which is an adapter's number
BY_CONTEXT, AT_1024 = "smollm2", "smollm2_1024"
SAVED = "kvprune.safetensors"
CURVES = ("loss_kl", "sparsity_soft", "alpha")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--only", help="one of the stages")
    parser.add_argument("--pack", action="store_true", help="into the package")
    args = parser.parse_args()
    keep_memory()
    for name in [args.only] if args.only else STAGES:
        train(name, args.runs)
    done = {name: args.runs / name for name in STAGES if finished(args.runs / name)}
    rows = [row for name, folder in done.items() for row in curve(name, folder)]
    publish("smollm2_training", {"recipe": RECIPE.name, "stages": STAGES}, rows, args.docs)
    draw(rows, args.docs)
    if args.pack:
        for name, folder in ((n, f) for n, f in done.items() if n.isdigit()):
            print(packed(name, folder, args.docs))


def train(name: str, runs: Path) -> None:
    folder = runs / name
    if name not in STAGES:
        raise PruneError(f"stage {name!r} is unknown; there are {', '.join(STAGES)}")
    if finished(folder):
        return
    if parts := STAGES[name].get("mean_of"):
        average([runs / part for part in parts], folder)
        return
    over = {"model": BASE, **STAGES[name]}
    if "start" in over:
        over["start"] = str(runs / over["start"])
        if not finished(Path(over["start"])):
            raise PruneError(f"{name} starts from {over['start']}, which is not trained yet")
    resume = any(folder.glob("checkpoint-*"))
    print(f"{'resuming' if resume else 'training'} {folder}", flush=True)
    run(make_recipe(merge_settings(read_yaml(RECIPE), over)), folder, resume)


def finished(folder: Path) -> bool:
    return (folder / SAVED).is_file()


def curve(name: str, folder: Path) -> list[Row]:
    """One row per logged step: the KL, the share pruned, α."""
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda f: f.stat().st_mtime)
    # a mean of runs has no log
    history: list[dict[str, Any]] = (
        json.loads(states[-1].read_text())["log_history"] if states else []
    )
    return [
        {"strength": name, "step": row["step"], **{key: row[key] for key in CURVES}}
        for row in history
        if "loss_kl" in row
    ]


def draw(rows: list[Row], docs: Path) -> None:
    figure, axes = drawing.panels(["KL to the dense model", "Context pruned, soft gate, %", "α"])
    strengths = list(dict.fromkeys(row["strength"] for row in rows))
    for number, name in enumerate(strengths, 1):
        own = [row for row in rows if row["strength"] == name]
        for axis, key in zip(axes, CURVES, strict=True):
            scale = 100 if key == "sparsity_soft" else 1
            steps = [row["step"] for row in own]
            drawing.line(axis, number, steps, [scale * row[key] for row in own], name)
            axis.set_xlabel("step of the run")
    axes[0].set_yscale("log")
    for part in (axes[0].yaxis.set_major_formatter, axes[0].yaxis.set_minor_formatter):
        part("{x:g}")
    drawing.legend(axes[0])
    save_figure(figure, "smollm2_training", docs)


def packed(name: str, folder: Path, docs: Path) -> str:
    """Copy an adapter into the package, with its measurements."""
    # both are read before anything is written
    (at, tokens), (rows, _) = measured(AT_1024, docs), measured(BY_CONTEXT, docs)
    own = {r["text"]: r for r in at if (r["method"], r["strength"]) == (OURS, name)}
    dense = {r["text"]: r["perplexity"] for r in at if r["method"] == DENSE}
    if not own:
        raise PruneError(f"{AT_1024}.json has no row of {name}; run quality.py with its adapter")
    sparsity = mean(row["sparsity"] for row in own.values())
    ratio = mean(row["perplexity"] / dense[text] for text, row in own.items())
    default = name == DEFAULT
    about = About(BASE, "wheel", int(name) / 100, round(sparsity, 4), round(ratio, 4), default)
    entry = pack(folder, f"{BASE}-{name}", about)
    settings = yaml.safe_load((folder / "recipe.yaml").read_text())
    for path in ("start", "model"):
        settings.pop(path, None)
    settings["data"] = {"length": settings["data"]["length"]}
    if parts := STAGES[name].get("mean_of"):
        settings = {"mean_of": list(parts), **settings}
    text = card(entry.name, about, tokens, rows, settings)
    write_atomically(entry.folder / "README.md", text.encode())
    return f"packed {entry.name}: {entry.size / 1e6:.2f} MB"


def measured(name: str, docs: Path) -> tuple[list[Row], int]:
    """Rows of quality.py, and the number of tokens of each text."""
    file = docs / "results" / f"{name}.json"
    if not file.is_file():
        raise PruneError(f"{file} does not exist; run quality.py with --name {name} first")
    results = json.loads(file.read_text())
    return results["rows"], results["about"]["tokens"]


if __name__ == "__main__":
    main()
