"""What kernels could reach on a GPU, and what fine-tuning needs of it: tables of docs/gpu.md.

python scripts/roofline.py            prints them
python scripts/roofline.py --write    puts them into the page, and draws the figure
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from kvprune.evaluate.cost.shape import Shape, read_shape
from kvprune.evaluate.roofline import decode, tokens
from kvprune.evaluate.roofline.decode import Case
from kvprune.evaluate.roofline.memory import Run, fine_tuning
from kvprune.evaluate.roofline.models import LLAMA_1B, LLAMA_8B, MODELS, QWEN3, SMOLLM2, Decoder
from kvprune.evaluate.roofline.tokens import Text
from kvprune.evaluate.roofline.work import A100, GPUS, H100, LAUNCHES, Work, seconds

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
FIGURE = PAGE.parent / "figures" / "roofline"
GRAPH, PYTHON = LAUNCHES.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/gpu.md, with the figure")
    write = parser.parse_args().write
    made = tables()
    if not write:
        print("\n\n".join(made.values()))
        return
    PAGE.write_text(filled(PAGE.read_text(), made))
    from kvprune.evaluate.roofline.figure import draw
    from kvprune.utils.plot import save

    save(draw(), FIGURE)


def filled(page: str, made: dict[str, str]) -> str:
    """The page with each table between its two comments."""
    for name, text in made.items():
        start, end = f"<!-- roofline: {name} -->", "<!-- end -->"
        before, found, rest = page.partition(start)
        assert found, f"{PAGE.name} has no place for the table {name}"
        page = f"{before}{start}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def tables() -> dict[str, str]:
    return {
        "kernels": markdown(
            ["kernel of one layer", "MiB", "MFLOP", "FLOP / byte", *_names("µs on", GPUS), "limit"],
            kernels(),
        ),
        "from": markdown(
            ["pruned", "rows", *(f"{name}, {m.name}" for name in LAUNCHES for m in PAIR)], begins()
        ),
        "step": markdown(
            ["context", *(f"{gpu.name}, {_rows(rows)}" for gpu in (A100, H100) for rows in ROWS)],
            steps(LLAMA_8B),
        ),
        "overhead": markdown(
            ["model", "key heads × size", "key and value, bytes", "beside them", "least pruned"],
            overhead(),
        ),
        "training": markdown(
            ["tiles alive", "A100: forward", "and backward", "H100: forward", "and backward"],
            training(LLAMA_1B),
        ),
        "prefill": markdown(
            ["pruned", *(f"{gpu.name}, {how}" for gpu in (A100, H100) for how in WAYS)],
            prefill(LLAMA_1B),
        ),
        "memory": markdown(
            ["model", "tune", "rows × tokens", "checkpointing", "weights + teacher", "AdamW",
             "activations", "tiles", "logits", "CUDA", "total, GiB"], memory(),
        ),
    }  # fmt: skip


ROWS = (1, 16, 64)
PAIR = (LLAMA_1B, LLAMA_8B)
WAYS = ("blocks of 128", "survivors packed")


def kernels() -> Iterator[list[str]]:
    """Llama-3.2-1B, 16 rows of 8,192 tokens, 80 % of them gone; bfloat16."""
    shape, case = _shape(LLAMA_1B), Case(16, 8192)
    layer = shape.layers[0]
    yield _kernel("dense: flash decoding", decode.dense(layer, shape.dtype, case)[0])
    for name, work in decode.pruned(layer, shape.dtype, case, shape.width).items():
        yield _kernel(f"pruned: {name}", work)
    text = Text(4, 2048)
    for name, work in tokens.flash(layer, shape.dtype, text).items():
        yield _kernel(f"dense training: {name}", work)
    for name, work in tokens.training(layer, shape.dtype, text).items():
        yield _kernel(f"pruned training: {name}", work)


def begins() -> Iterator[list[str]]:
    """The context from which a layer's attention is faster pruned than dense, on an A100."""
    for sparsity in (0.5, 0.8, 0.9):
        for rows in ROWS:
            found = [
                decode.break_even(_shape(model), Case(rows, 0, sparsity), A100, launch)
                for launch in LAUNCHES.values()
                for model in PAIR
            ]
            yield [f"{sparsity:.0%}", str(rows), *map(_tokens, found)]


def steps(model: Decoder) -> Iterator[list[str]]:
    """Dense time of a whole step / pruned time, 80 % gone, in CUDA graphs."""
    shape = _shape(model)
    for context in (256, 1024, 4096, 16384, 65536):
        cells = [f"{context:,}"]
        for gpu in (A100, H100):
            for rows in ROWS:
                dense, pruned = decode.step(shape, Case(rows, context), gpu, GRAPH)
                cells.append(f"{dense / pruned:.2f} ×")
        yield cells


def overhead() -> Iterator[list[str]]:
    for model in (*MODELS, Decoder("one key head of 64", 768, 3072, 12, 12, 1, 64, 50257)):
        layer, dtype = _shape(model).layers[0], "bfloat16"
        own, slot = decode.token_bytes(layer, dtype), decode.slot_bytes(layer, dtype, 64)
        yield [
            model.name, f"{model.key_heads} × {model.size}", f"{own:,}",
            f"+ {slot - own} ({slot / own - 1:.1%})", f"{decode.least_sparsity(layer, dtype):.1%}",
        ]  # fmt: skip


def training(model: Decoder) -> Iterator[list[str]]:
    """Time of a layer's attention / dense flash attention's, rows of 2,048 tokens, r = 64."""
    shape, text = _shape(model), Text(4, 2048)
    layer = shape.layers[0]
    for alive, per_head in ((1.0, True), (1.0, False), (0.5, False), (0.2, False), (0.1, False)):
        cells = [f"{alive:.0%}, gates computed by every head" if per_head else f"{alive:.0%}"]
        for gpu in (A100, H100):
            dense = tokens.flash(layer, shape.dtype, text)
            own = text._replace(alive=alive)
            works = tokens.training(layer, shape.dtype, own, per_head)
            forward = seconds((works[name] for name in tokens.FORWARD), gpu, exact=False)
            both = seconds(works.values(), gpu, exact=False)
            cells.append(f"{forward / dense['forward'].seconds(gpu):.2f} ×")
            cells.append(f"{both / seconds(dense.values(), gpu):.2f} ×")
        yield cells


def prefill(model: Decoder) -> Iterator[list[str]]:
    """Time of a layer's attention / dense flash attention's, one row of 8,192 tokens."""
    shape, text = _shape(model), Text(1, 8192)
    layer = shape.layers[0]
    for sparsity in (0.5, 0.8, 0.9):
        cells = [f"{sparsity:.0%}"]
        for gpu in (A100, H100):
            dense = tokens.flash(layer, shape.dtype, text, backward=False)["forward"].seconds(gpu)
            for packed in (False, True):
                works = tokens.prefill(layer, shape.dtype, text, sparsity, packed)
                cells.append(f"{seconds(works.values(), gpu, exact=False) / dense:.2f} ×")
        yield cells


def memory() -> Iterator[list[str]]:
    runs = [
        (LLAMA_1B, Run(4, 2048)), (LLAMA_1B, Run(4, 2048, checkpointing=False)),
        (LLAMA_1B, Run(2, 2048, checkpointing=False)), (LLAMA_1B, Run(2, 8192)),
        (LLAMA_1B, Run(1, 2048, "all", distill=False)),
        (QWEN3, Run(4, 2048)), (QWEN3, Run(2, 2048, checkpointing=False)), (QWEN3, Run(2, 8192)),
        (QWEN3, Run(1, 2048, "all")), (SMOLLM2, Run(4, 2048, "all")),
    ]  # fmt: skip
    for model, run in runs:
        m = fine_tuning(model, run)
        parts = m.weights + m.teacher, m.trained, m.activations, m.tiles, m.logits, m.context
        tune = "LoRA 16" if run.tune == "lora" else "all"
        yield [
            model.name, f"{tune}, distilled" if run.distill else tune,
            f"{run.rows} × {run.length:,}", "yes" if run.checkpointing else "no",
            *(f"{part / 2**30:.1f}" for part in parts), f"**{m.total / 2**30:.1f}**",
        ]  # fmt: skip


def markdown(columns: list[str], rows: Iterator[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _kernel(name: str, work: Work) -> list[str]:
    times = [f"{1e6 * work.bound(gpu, exact=False)[0]:.1f}" for gpu in GPUS]
    return [name, f"{work.bytes / 2**20:.1f}", f"{work.flops / 1e6:,.0f}",
            f"{work.intensity:.1f}", *times, work.bound(A100, exact=False)[1]]  # fmt: skip


def _names(what: str, gpus: tuple) -> list[str]:
    return [f"{what} {gpu.name}" for gpu in gpus]


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number} rows"


def _tokens(context: float) -> str:
    return "never" if math.isinf(context) else f"{round(context, -1):,.0f}"


def _shape(model: Decoder) -> Shape:
    if model not in SHAPES:
        SHAPES[model] = read_shape(model.config(num_hidden_layers=model.layers))
    return SHAPES[model]


SHAPES: dict[Decoder, Shape] = {}


if __name__ == "__main__":
    main()
