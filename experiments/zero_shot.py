"""Zero-shot accuracy against sparsity: WinoGrande, HellaSwag, PIQA and LAMBADA.

    python -m experiments.zero_shot --files FOLDER   writes docs/results/zero_shot.json and a figure

The paper's Fig. zero_shot, with the models of tiny_curve.py. A model of 5.9 million parameters
is hardly better than chance; the question is whether forgetting costs it what little it has.
# full scale: kvprune eval zeroshot runs/gpt2-small --out runs/gpt2-small/zeroshot
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from experiments import small
from experiments.publish import publish, save_figure
from kvprune import DenseConfig, LocalConfig, PruningConfig, StridedConfig
from kvprune.config import Config
from kvprune.evaluate.points import Points
from kvprune.evaluate.zeroshot.run import HUB, run
from kvprune.utils.plot import COLOURS, legend, level, line, panels

CHANCE = {"winogrande": 0.5, "hellaswag": 0.25, "piqa": 0.5, "lambada": 0.0}
SETTINGS: list[tuple[str, Config, dict[str, Any]]] = [
    ("dense", DenseConfig(), {}),
    *(("pruning", PruningConfig(rank=small.RANK), {"gamma": g}) for g in (0.03, 0.1, 0.3, 1.0)),
    *(("local", LocalConfig(window), {}) for window in (64,)),
    *(("strided", StridedConfig(stride), {}) for stride in (64,)),
]


def main() -> None:
    parser = small.arguments(__doc__)
    parser.add_argument("--files", type=Path, required=True, help="the four tasks' files")
    parser.add_argument("--limit", type=int, default=200, help="samples of each task")
    args = parser.parse_args()
    runs = small.Runs(args.runs)
    points = Points(args.runs / "zero_shot.json", {**runs.about, "limit": args.limit})
    for seed in range(args.seeds):
        for name, method, settings in SETTINGS:
            folder = runs.run_folder(method, seed, **settings)
            key = {"method": name, **settings, "seed": seed}

            def measure(folder: Path = folder) -> list[dict[str, Any]]:
                result = run(str(folder), files=args.files, limit=args.limit, batch=16)
                return [scored.to_dict() for scored in result.rows]

            mean = points.measure(key, measure)[-1]
            print(key, f"{mean['accuracy']:.4f} at {mean['sparsity']:.1%}", flush=True)
    publish("zero_shot", points.about, points.rows)
    draw(points.rows)


def draw(rows: list[dict[str, Any]]) -> None:
    """One panel per task and one for their mean; the dashed line is the dense model's."""
    tasks = [*HUB, "mean"]
    chance = {**CHANCE, "mean": statistics.mean(CHANCE.values())}
    figure, axes = panels([f"{task} (chance {chance[task]:.0%})" for task in tasks])
    for axis, task in zip(axes, tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        for number, method in enumerate(("dense", "pruning", "local", "strided")):
            own = [row for row in of_task if row["method"] == method]
            settings = dict.fromkeys(row.get("gamma") for row in own)
            groups = [[row for row in own if row.get("gamma") == g] for g in settings]
            x = [100 * statistics.mean(row["sparsity"] for row in group) for group in groups]
            y = [100 * statistics.mean(row["accuracy"] for row in group) for group in groups]
            line(axis, number, x, y, method)
            for group, at in zip(groups, x, strict=True):
                values = [100 * row["accuracy"] for row in group]
                axis.plot([at, at], [min(values), max(values)], color=COLOURS[number], lw=1)
            if method == "dense":
                level(axis, y[0])
        axis.set(xlabel="context pruned over the samples, %", ylabel="accuracy, %")
    legend(axes[0])
    save_figure(figure, "zero_shot")


if __name__ == "__main__":
    main()
