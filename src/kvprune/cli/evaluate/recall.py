"""kvprune eval recall: whether a model finds, follows, counts and repeats what was said earlier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprune.cli.evaluate.common import print_written, table
from kvprune.cli.names import AdapterName, ModelName, check_model
from kvprune.utils.malloc import keep_memory
from kvprune.utils.parse import numbers
from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from kvprune.evaluate.recall.run import Measured


def recall(
    model: ModelName,
    adapter: AdapterName = None,
    tasks: Annotated[
        str, typer.Option(help="Any of these.")
    ] = "needle,multikey,multivalue,variables,words,copy,repeats",
    contexts: Annotated[
        str | None,
        typer.Option(help="Tokens of a prompt.", show_default="256,512,1024, as the model can"),
    ] = None,
    depths: Annotated[
        str, typer.Option(help="Where the fact is, from 0 (beginning) to 1 (end).")
    ] = "0.1,0.5,0.9",
    samples: Annotated[
        int, typer.Option(help="Prompts of each task, context and depth.", min=1)
    ] = 10,
    text: Annotated[
        Path | None,
        typer.Option(help="Text around the facts: .txt or .txt.gz.", show_default="a book"),
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Also measure: streaming,tova,h2o,snapkv,keynorm,local,strided.")
    ] = "",
    budget: Annotated[
        float | None,
        typer.Option(
            help="Tokens that policies hold, or a share below 1.",
            show_default="as many as the model",
        ),
    ] = None,
    dense: Annotated[bool, typer.Option(help="Compare with the dense model.")] = True,
    dense_model: Annotated[
        str | None,
        typer.Option(
            help="The dense model to compare with.",
            show_default="its base model",
            callback=check_model,
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(help="Ask in the chat template.", show_default="if there is one"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all prompts.", min=0)] = 0,
    batch: Annotated[int, typer.Option(help="Prompts read at once.", min=1)] = 4,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ...", show_default="cuda if available")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for numbers and figures; resumes from it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure recall: needles, variables, common words, copying, and text that repeats itself."""
    sizes = None if contexts is None else numbers(contexts, int, "--contexts")
    places = numbers(depths, float, "--depths")

    from kvprune.evaluate.recall.run import run

    quiet()
    keep_memory()
    measured = run(
        model, adapter=adapter, tasks=tasks.split(","), contexts=sizes, depths=places,
        samples=samples, text=text, policies=[part for part in policies.split(",") if part],
        budget=budget, dense=dense, dense_model=dense_model, chat=chat, seed=seed, batch=batch,
        dtype=dtype, device=device, out=out,
    )  # fmt: skip
    if as_json:
        print(json.dumps(measured.to_dict()))
    else:
        _show(measured)
    if out is not None:
        print_written(out / f"recall.{end}" for end in ("json", "png", "svg"))


def _show(measured: Measured) -> None:
    name = measured.about["adapter"] or measured.about["model"]
    rows = sorted(
        (row for row in measured.rows if row["depth"] == "all"),
        key=lambda row: (measured.about["tasks"].index(row["task"]), row["context"]),
    )
    if rows:
        table(
            f"{name}: right answers, over depths; 95 % of n prompts by Wilson's interval",
            ["task", "model", "context", "n", "right", "95 %", "log p", "pruned"],
            (
                [row["task"], row["side"], f"{row['context']:,}", str(row["n"]),
                 f"{row['score']:.1%}", f"{row['low']:.0%} to {row['high']:.0%}",
                 f"{row['log_p']:.2f}", f"{row['sparsity']:.1%}"]
                for row in rows
            ),
            left=2,
        )  # fmt: skip
    if measured.repeats:
        table(
            f"{name}: text said again; / dense with 95 % over windows by bootstrap",
            ["repeated so far", "tokens back", "model", "context", "windows", "tokens",
             "perplexity", "/ dense", "95 %", "pruned"],
            # by length or by distance; both at once are in the JSON
            (_cells(row) for row in sorted(measured.repeats, key=_order) if _sums_up(row)),
            left=3,
        )  # fmt: skip


def _sums_up(row: dict[str, Any]) -> bool:
    return row["matched"] in ("all", "rest") or row["distance"] == "all"


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    """By context and class; those that sum up the others last."""
    sums = [row[name] in ("all", "rest") for name in ("matched", "distance")]
    first = [0 if s else int(row[name].split("-")[0].rstrip("+"))
             for name, s in zip(("matched", "distance"), sums, strict=True)]  # fmt: skip
    return row["context"], row["matched"] == "rest", sums[0], first[0], sums[1], first[1]


def _cells(row: dict[str, Any]) -> list[str]:
    compared = row["ratio"] is not None
    return [
        row["matched"], row["distance"], row["side"], f"{row['context']:,}", str(row["windows"]),
        f"{row['tokens']:,}", f"{row['perplexity']:.2f}",
        f"{row['ratio']:.3f} ×" if compared else "",
        f"{row['low']:.3f} to {row['high']:.3f}" if compared else "", f"{row['sparsity']:.1%}",
    ]  # fmt: skip
