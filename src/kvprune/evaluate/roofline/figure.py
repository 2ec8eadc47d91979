"""The roofline, where pruned attention overtakes dense, and how fast a whole step could be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprune.evaluate.cost.shape import Shape, read_shape
from kvprune.evaluate.roofline import decode, tokens
from kvprune.evaluate.roofline.decode import Case
from kvprune.evaluate.roofline.models import LLAMA_1B, LLAMA_8B
from kvprune.evaluate.roofline.tokens import Text
from kvprune.evaluate.roofline.work import A100, H100, LAUNCHES, Gpu, Work, seconds
from kvprune.utils.plot import COLOURS, INK, MARKERS, legend, level, line, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CONTEXTS = [2**power for power in range(7, 18)]


def draw() -> Figure:
    small, large = (read_shape(model.config()) for model in (LLAMA_1B, LLAMA_8B))
    figure, (roof, attention, whole) = panels(
        ["What limits each kernel", "One layer's attention, Llama-3.2-1B, one row",
         "A whole decode step"],
        width=4.7, height=3.9,
    )  # fmt: skip
    _roof(roof, small)
    _attention(attention, small, A100)
    _whole(whole, large)
    return figure


def _roof(axis: Axes, shape: Shape) -> None:
    layer, dtype = shape.layers[0], shape.dtype
    ratios = [2 ** (power / 4) for power in range(4, 45)]
    for gpu, style in ((H100, "-"), (A100, "--")):
        reached = [min(gpu.tensor, ratio * gpu.bandwidth) / 1e12 for ratio in ratios]
        axis.plot(ratios, reached, style, color=COLOURS[0], linewidth=1.2, label=gpu.name)
    case, text = Case(16, 8192), Text(4, 2048)
    votes = decode.pruned(layer, dtype, case, shape.width)["vote, drop, attend"]
    learns = tokens.training(layer, dtype, text)["forward"]
    flash = tokens.flash(layer, dtype, text)["forward"]
    points: list[tuple[str, Work]] = [
        ("decode, dense", decode.dense(layer, dtype, case)[0]),
        ("decode, pruned", votes),
        ("training, dense", flash),
        ("training, pruned", learns),
    ]
    for number, (name, work) in enumerate(points, 1):
        products = work.tensor + work.scores  # what the roof is of
        height = products / work.bound(H100, exact=False)[0] / 1e12
        axis.plot(
            [products / work.bytes], [height], MARKERS[number], color=COLOURS[number], label=name,
            markersize=7,
        )  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="TFLOP/s", ylim=(1, 2000))
    legend(axis, loc="lower right")


def _attention(axis: Axes, shape: Shape, gpu: Gpu) -> None:
    layer, dtype = shape.layers[0], shape.dtype
    for number, (name, launch) in enumerate(LAUNCHES.items()):
        sides: dict[str, list[float]] = {"dense": [], "80 % pruned": []}
        for context in CONTEXTS:
            case = Case(1, context)
            works = decode.pruned(layer, dtype, case, shape.width).values()
            dense = decode.dense(layer, dtype, case)
            sides["dense"].append(1e6 * seconds(dense, gpu, launch))
            sides["80 % pruned"].append(1e6 * seconds(works, gpu, launch))
        for side, (label, times) in enumerate(sides.items()):
            style = "-" if number == 0 else ":"
            line(axis, side, CONTEXTS, times, f"{label}, {name}", linestyle=style, markersize=3)
    axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel=f"µs, {gpu.name}")
    legend(axis, loc="upper left")


def _whole(axis: Axes, shape: Shape) -> None:
    launch = LAUNCHES["in a CUDA graph"]
    for number, rows in enumerate((1, 16, 64), 1):
        times = [decode.step(shape, Case(rows, context), H100, launch) for context in CONTEXTS]
        name = f"{rows} row{'s' if rows > 1 else ''}"
        line(axis, number, CONTEXTS, [dense / pruned for dense, pruned in times], name)
    level(axis, 1)
    axis.set(xscale="log", xlabel="context, tokens", ylabel="dense time / pruned", ylim=(0, None))
    axis.text(
        CONTEXTS[-1], 0.15, "Llama-3.1-8B, 80 % pruned, H100", ha="right", fontsize=8, color=INK
    )
    legend(axis, loc="upper left")
