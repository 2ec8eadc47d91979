"""What the misses of SmolLM2 come to: shares with intervals, tables and a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from experiments.publish import save_figure
from experiments.smollm2.common import Row, table
from kvprune.utils import plot as drawing

COUNTS = (1, 2, 3, 5, 10, 20, 50, 100, 200)  # of the most missed tokens
RETURNS = {
    "random": "one, by chance",
    "one_layer": "one, in one layer",
    "all_layers": "one, in all layers",
    "three": "three",
    "open": "all tokens",
}
RESAMPLES = 10_000
Share = Callable[[Sequence[Row]], tuple[float, float]]


def line(rows: list[Row]) -> str:
    """Progress: the article measured last."""
    article = [row for row in rows if row["row"] == "article"][-1]
    costs = article["cost"].items()
    nats = ", ".join(f"against {name} {found['net']:6.1f} nats" for name, found in costs)
    return (
        f"{article['text']:9} {article['article']:3}  {article['title'][:40]:40} "
        f"{article['sparsity']:.1%} dropped, cost {nats}"
    )


def interval(articles: Sequence[Sequence[Row]], share: Share) -> tuple[float, float, float]:
    """Σ part / Σ whole over articles, and its 95 % interval by bootstrap over articles."""
    parts = np.array([share(rows) for rows in articles])  # (articles, 2)
    chosen = np.random.default_rng(0).integers(0, len(parts), (RESAMPLES, len(parts)))
    sums = parts[chosen].sum(1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    total = parts.sum(0)
    return float(total[0] / total[1]), float(low), float(high)


def by_article(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each article, its own first."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["text"], row["article"]), []).append(row)
    return list(groups.values())


def cost(row: Row) -> float:
    return float(row["loss"] - row["dense_loss"])


def explained(count: int, which: str = "worst", against: str = "open", of: str = "net") -> Share:
    """What the most missed tokens cost, of what all cost: net, or only those that suffer.

    against: the open gates (what forgetting costs), or the dense model (LoRA included).
    """

    def share(rows: Sequence[Row]) -> tuple[float, float]:
        found = rows[0]["cost"][against]
        return found[which][COUNTS.index(count)], found[of]

    return share


def recovered(name: str) -> Share:
    """What bringing tokens back gains, of what the most missed tokens cost."""

    def share(rows: Sequence[Row]) -> tuple[float, float]:
        misses = rows[1:]
        back = [miss["open_loss"] if name == "open" else (miss.get(name) or miss)["loss"]
                for miss in misses]  # fmt: skip
        gain = sum(miss["loss"] - loss for miss, loss in zip(misses, back, strict=True))
        return gain, sum(cost(miss) for miss in misses)

    return share


def among_misses(column: str, *values: object) -> Share:
    """The share of the most missed tokens that are of a class."""

    def share(rows: Sequence[Row]) -> tuple[float, float]:
        return sum(miss[column] in values for miss in rows[1:]), len(rows) - 1

    return share


def among_all(column: str, values: Sequence[str], place: int) -> Share:
    """The same of all tokens (place 0), or of what they cost (1: against dense, 2: open gates)."""

    def share(rows: Sequence[Row]) -> tuple[float, float]:
        counts = rows[0][column]
        part = sum(counts[value][place] for value in values if value in counts)
        return part, sum(own[place] for own in counts.values())

    return share


def show(rows: list[Row]) -> None:
    articles = by_article(rows)
    lines = []
    for against in ("open", "dense"):
        shares: dict[str, Share] = {}
        for count in (1, 5, 10, 20, 50):
            shares[f"{count} most missed, of the net cost"] = explained(count, against=against)
            shares[f"{count} most missed, of what suffers"] = explained(
                count, against=against, of="suffered"
            )
        shares["10 that gain most, of the net cost"] = explained(10, "best", against)
        lines += [[f"against {against}: {name}", *cells(interval(articles, share))]
                  for name, share in shares.items()]  # fmt: skip
    for name, label in RETURNS.items():
        lines.append([f"recovered by {label}", *cells(interval(articles, recovered(name)))])
    for text in dict.fromkeys(row["text"] for row in rows):
        own = [group for group in articles if group[0]["text"] == text]
        lines.append([f"10 most missed, {text}", *cells(interval(own, explained(10)))])
        for against in ("open", "dense"):
            nats = [group[0]["cost"][against]["net"] for group in own]
            spread = f"{min(nats):.1f} to {max(nats):.1f} by article"
            lines.append([f"nats, {text}, against {against}", f"mean {np.mean(nats):.1f}", spread])
    table(["share", "%", "95 % interval"], lines)
    same = np.mean([group[0]["same_ten"] for group in articles])
    print(f"\n{same:.1f} of the ten most missed are the same by both measures\n")
    show_classes(rows)
    print()
    show_returns(rows)


def show_classes(rows: Sequence[Row]) -> None:
    """Each class of tokens: its share of the most missed, of all tokens, and of the net cost."""
    articles, lines = by_article(rows), []
    for column, name in (("kind", "kinds"), ("speech", "speeches"), ("repeated", "repeats")):
        for value in sorted({value for group in articles for value in group[0][name]}):
            # an n-gram of two tokens or more is one class
            own = {"0": (0,), "1": (1,), "2": range(2, 99)}.get(value, (value,))
            lines.append([
                f"{column}: {value}",
                *cells(interval(articles, among_misses(column, *own))),
                *cells(interval(articles, among_all(name, [value], 0))),
                *cells(interval(articles, among_all(name, [value], 2))),
            ])  # fmt: skip
    table(["class", "of misses", "", "of tokens", "", "of the cost", ""], lines)


def show_returns(rows: Sequence[Row]) -> None:
    misses = [row for row in rows if row["row"] == "miss"]
    for name in ("all_layers", "one_layer", "random"):
        back = [row[name] for row in misses if name in row]
        if not back:
            continue
        distance = np.quantile([row["distance"] for row in back], [0.1, 0.25, 0.5, 0.75, 0.9])
        copies = [sum(row["copy_of"] == n for row in back) / len(back) for n in (0, 1)]
        real = [row[name]["loss"] - row["loss"] for row in misses if name in row]
        estimated = [row["estimated_change"] for row in back]
        correlation = np.corrcoef(real, estimated)[0, 1]
        print(
            f"{name}: {len(back)}, distance {distance.tolist()}, copies of the missed token "
            f"{copies[0]:.0%}, of the one before it {copies[1]:.0%}; change {np.mean(real):.2f}, "
            f"estimated {np.mean(estimated):.2f}, correlation {correlation:.2f}"
        )
    layers = [row["one_layer"]["layer"] for row in misses if "one_layer" in row]
    if layers:
        names, counts = np.unique(layers, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        print("layers:", ", ".join(f"{names[i]}: {counts[i]}" for i in order))


def cells(found: tuple[float, float, float]) -> list[str]:
    return [f"{100 * found[0]:.1f}", f"{100 * found[1]:.1f} to {100 * found[2]:.1f}"]


def draw(rows: list[Row], docs: Path) -> None:
    articles = by_article(rows)
    titles = ["Losses and gains", "Brought back for the ten", "What kind of tokens"]
    figure, (left, middle, right) = drawing.panels(titles)
    for number, (name, label) in enumerate(
        {"worst": "the most missed tokens", "best": "the tokens that gain most"}.items(), 1
    ):
        shares = [explained(count, name, of="suffered") for count in COUNTS]
        found = np.array([interval(articles, share) for share in shares]) * 100
        drawing.line(left, number, COUNTS, found[:, 0].tolist(), label)
        left.fill_between(COUNTS, found[:, 1], found[:, 2], alpha=0.15,
                          color=drawing.COLOURS[number], linewidth=0)  # fmt: skip
    drawing.level(left, 0.0)
    left.set(
        xscale="log", xlabel="tokens per article of 1,000", ylabel="of all losses by forgetting, %"
    )
    left.set_xticks(COUNTS[::2], [str(count) for count in COUNTS[::2]])
    left.minorticks_off()
    drawing.legend(left)
    bars(middle, [(label, [interval(articles, recovered(name))])
                  for name, label in RETURNS.items()], ["recovered of their cost, %"])  # fmt: skip
    pairs = []
    for title, (column, name, values) in SHOWN.items():
        own = range(2, 99) if column == "repeated" else values
        pairs.append((title, [
            interval(articles, among_misses(column, *own)),
            interval(articles, among_all(name, values, 0)),
        ]))  # fmt: skip
    bars(right, pairs, ["of the most missed, %", "of all tokens, %"])
    drawing.legend(right, loc="lower right")
    save_figure(figure, "smollm2_misses", docs)


SHOWN = {
    "repeated n-gram": ("repeated", "repeats", ("2",)),
    "name": ("speech", "speeches", ("name",)),
    "noun": ("speech", "speeches", ("noun",)),
    "verb": ("speech", "speeches", ("verb",)),
    "number": ("kind", "kinds", ("number",)),
    "punctuation": ("kind", "kinds", ("punctuation", "line break")),
}


def bars(axis, groups, labels) -> None:
    """Horizontal bars with their intervals, one colour for each label."""
    height = 0.8 / len(labels)
    for number, label in enumerate(labels):
        found = np.array([values[number] for _, values in groups]) * 100
        place = np.arange(len(groups))[::-1] - number * height
        error = np.abs(found[:, 1:] - found[:, :1]).T
        axis.barh(place, found[:, 0], height * 0.9, color=drawing.COLOURS[1 - number],
                  label=label)  # fmt: skip
        axis.errorbar(found[:, 0], place, xerr=error, fmt="none", ecolor=drawing.INK,
                      elinewidth=0.9)  # fmt: skip
    middle = np.arange(len(groups))[::-1] - (len(labels) - 1) * height / 2
    axis.set_yticks(middle, [name for name, _ in groups])
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(labels[0] if len(labels) == 1 else "%")
