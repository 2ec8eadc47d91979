"""Tokens per second by context and sparsity, with the model's own decisions and in the ideal case.

    python -m experiments.throughput          writes docs/results/throughput.json and a figure

The paper's Fig. throughput and ideal_throughput. GPT-2 small's shape with random weights and equal
rows; and the models of tiny_curve.py with what each row and layer keeps of a book, compared with
equal rows. Run it on an otherwise idle machine.
# full scale: kvprune eval throughput runs/gpt2-small --context 128,256,512,1000 --memory 16GB
"""

from __future__ import annotations

from typing import Any

from experiments import small
from experiments.publish import publish, save_figure
from kvprune import PruningConfig
from kvprune.evaluate.points import Points
from kvprune.evaluate.throughput.models import load_pair
from kvprune.evaluate.throughput.run import Sweep, throughput
from kvprune.evaluate.throughput.timing import machine, versions
from kvprune.utils.plot import legend, line, panels

LARGE = Sweep(
    contexts=(128, 256, 512, 1000), batches=(8, 32), sparsities=(0.5, 0.8, 0.9), repeats=3
)
GAMMAS = (0.1, 0.3, 1.0)
Row = dict[str, Any]


def main() -> None:
    args = small.arguments(__doc__).parse_args()
    runs = small.Runs(args.runs)
    about = {"machine": machine(), "versions": versions()}
    points = Points(args.runs / "throughput_gpt2.json", about)
    models = load_pair("gpt2", dtype="float32", random=True)
    rows = [{"model": "gpt2", **row} for row in throughput(models, LARGE, points, print_count)]
    for gamma in GAMMAS:
        folder = runs.run_folder(PruningConfig(rank=small.RANK), gamma=gamma)
        models = load_pair(str(folder), dtype="float32")
        sweep = Sweep((64, 128, 256, 480), (32,), (), repeats=5)
        points = Points(args.runs / f"throughput_{gamma}.json", about)
        realistic = throughput(models, sweep, points, print_count)
        # the same sparsity, but equal in every row and layer
        at = {row["context"]: round(row["sparsity"], 2) for row in realistic if row["sparsity"]}
        for context, share in at.items():
            sweep = Sweep((context,), (32,), (share,), repeats=5)
            throughput(models, sweep, points, print_count)
        rows += [{"model": "tiny", "gamma": gamma, **row} for row in points.rows]
    publish("throughput", about, rows)
    for row in rows:
        if row["side"] != "dense":
            where = f"context {row['context']:4} batch {row['batch']:2} {row['rows']:9}"
            speed = f"pruned {row['sparsity']:4.0%} {row['ratio']:.2f} × dense"
            print(row["model"], row.get("gamma", ""), where, speed)
    draw(rows)


def print_count(settings: list[Row]) -> list[Row]:
    print(f"{len(settings)} settings", flush=True)
    return settings


def draw(rows: list[Row]) -> None:
    """GPT-2's shape: tokens/s and time per step. Tiny: speedup by its own decisions."""
    titles = ["Tokens/s, batch 32, GPT-2 small's shape", "Time of a step, ms, batch 32",
              "Tokens/s against dense, tiny, batch 32"]  # fmt: skip
    figure, (speed, step, own) = panels(titles, width=4.6)
    large = [row for row in rows if row["model"] == "gpt2" and row["batch"] == 32]
    for number, (name, group) in enumerate(by_side(large).items()):
        x = [row["context"] for row in group]
        line(speed, number, x, [row["tokens_per_second"] for row in group], name)
        line(step, number, x, [1000 * row["seconds_step"] for row in group], name)
    for number, gamma in enumerate(GAMMAS, 1):
        pruned = [r for r in rows if r.get("gamma") == gamma and r["side"] != "dense"]
        for kind, style in (("realistic", "-"), ("ideal", "--")):
            group = [row for row in pruned if row["rows"] == kind]
            x, y = [row["context"] for row in group], [row["ratio"] for row in group]
            line(own, number, x, y, f"γ = {gamma}, {kind}")
            own.lines[-1].set_linestyle(style)
    for axis in (speed, step, own):
        axis.set(xlabel="context, tokens", ylim=(0, None))
        legend(axis)
    save_figure(figure, "throughput")


def by_side(rows: list[Row]) -> dict[str, list[Row]]:
    """Dense once (from the run of the first sparsity), pruning at each sparsity."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        dense = row["side"] == "dense"
        if not dense or row["at"] == LARGE.sparsities[0]:
            name = "dense" if dense else f"{row['at']:.0%} pruned"
            groups.setdefault(name, []).append(row)
    return groups


if __name__ == "__main__":
    main()
