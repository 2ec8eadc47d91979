"""An animated SVG of a text being read, for READMEs and slides."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from kvprune.errors import PruneError
from kvprune.explain.trace import Trace
from kvprune.ops.timeline import NEVER
from kvprune.utils.files import write_atomically

# monospaced characters are 0.6 em wide in common fonts; textLength enforces it in the others
SIZE, CHARACTER, LINE, MARGIN, COLUMNS = 15, 9.0, 26, 24, 84
PAUSE = 0.2  # share of the duration for which the end is shown
STYLE = """
  :root { --ink: #1f2430; --quiet: #6b7280; --accent: #2f6f6a; --tint: #d9e6e4; --empty: #e7e4de;
    --paper: #fbfaf8 }
  @media (prefers-color-scheme: dark) { :root { --ink: #e6e4df; --quiet: #98a0ac; --accent: #6cc0b7;
    --tint: #24403f; --empty: #2c323b; --paper: #14171c } }
  text { white-space: pre; fill: var(--ink); font: 15px ui-monospace, Menlo, Consolas, monospace }
  .label { fill: var(--quiet); font: 12.5px system-ui, sans-serif }
  .paper { fill: var(--paper) } .room { fill: var(--empty) } .dense { fill: var(--quiet) }
  .kept { fill: var(--accent) } .box { fill: var(--tint) }
  .gone text { opacity: .28 } .gone rect { opacity: 0 }
  g > text, g > rect, .bar { animation: var(--n) var(--all) linear infinite }
  @media (prefers-reduced-motion: reduce) { * { animation: none !important } }
"""


@dataclass(frozen=True)
class PlacedToken:
    """Where a token is drawn: `width` cells from `column` of a line."""

    column: int
    line: int
    width: int
    text: str


def animate(
    trace: Trace, path: str | Path, layer: int | None = None, seconds: float | None = None
) -> Path:
    """Write the SVG: tokens appear as they are read and fade when the layer drops them.

    layer: its index in the model; by default the one that drops most. For readers who prefer
    reduced motion it shows the end.
    """
    file = Path(path)
    if file.suffix != ".svg":
        raise PruneError(f"{file} does not end in .svg; the animation is an SVG file")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, render(trace, layer, seconds).encode())
    return file


def render(trace: Trace, layer: int | None = None, seconds: float | None = None) -> str:
    """The SVG as text."""
    if layer is None:
        index = int(trace.sparsity.mean(1).argmax())
    elif layer in trace.layers:
        index = trace.layers.index(layer)
    else:
        raise PruneError(f"layer {layer} is not in the trace; it has {trace.layers}")
    T = len(trace.tokens)
    seconds = seconds or min(40.0, 4 + T / 8)
    if not seconds > 0:
        raise PruneError(f"seconds={seconds} must be more than 0")
    # when token k is read, in percent of the duration
    moment = np.arange(T + 1) / max(T, 1) * (1 - PAUSE) * 100
    placed = place_tokens(trace.tokens)
    height = (max(token.line for token in placed) + 1) * LINE + 2 * MARGIN + 52
    width = COLUMNS * CHARACTER + 2 * MARGIN
    keyframes, tokens = [], []
    for j, token in enumerate(placed):
        if not token.text:
            continue
        step = int(trace.drop_step[index, j])
        keyframes += _token_keyframes(j, moment[j], moment[step] if step < NEVER else None)
        tokens.append(_token_group(j, token, step < NEVER))
    kept = trace.kept[index] / T
    keyframes.append(_bar_keyframes("dense", moment, (np.arange(T) + 1) / T))
    keyframes.append(_bar_keyframes("kept", moment, kept))
    about = f"layer {trace.layers[index]} holds {trace.kept[index, -1]} of {T} tokens at the end"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" role="img" aria-label="A text being read: {about}">'
        f"<style>{STYLE}:root {{ --all: {seconds:.1f}s }}\n{''.join(keyframes)}</style>"
        f'<rect class="paper" width="100%" height="100%" rx="10"/>'
        f"{''.join(tokens)}{_bars(width, height, about, float(kept[-1]))}</svg>\n"
    )


def place_tokens(tokens: tuple[str, ...]) -> list[PlacedToken]:
    """Lay out the text in lines, broken between words."""
    placed: list[PlacedToken] = []
    column = line = 0
    for i, token in enumerate(tokens):
        # XML does not allow control characters
        shown = "".join(c for c in token.replace("\t", " ") if unicodedata.category(c) != "Cc")
        breaks = token.count("\n")
        if breaks and not shown:
            # at most one empty line between paragraphs
            line, column = line + min(breaks, 2), 0
            placed.append(PlacedToken(0, line, 0, ""))
            continue
        width = cell_width(shown)
        word = width + sum(cell_width(part) for part in _rest_of_word(tokens, i))
        starts_word = not _continues_word(tokens, i)
        if column and column + (min(word, COLUMNS) if starts_word else width) > COLUMNS:
            line, column = line + 1, 0
        if column == 0 and shown.startswith(" "):
            shown = shown[1:]
            width = cell_width(shown)
        placed.append(PlacedToken(column, line, width, shown))
        column += width
        if breaks:
            line, column = line + 1, 0
    return placed


def cell_width(text: str) -> int:
    """The number of character cells: two for wide characters, none for combining marks."""
    return sum(
        0 if unicodedata.combining(c) or unicodedata.category(c) == "Cf"
        else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )  # fmt: skip


def _continues_word(tokens: tuple[str, ...], i: int) -> bool:
    return i > 0 and not tokens[i][:1].isspace() and not tokens[i - 1][-1:].isspace()


def _rest_of_word(tokens: tuple[str, ...], i: int) -> list[str]:
    rest = []
    for token in tokens[i + 1 :]:
        if not token or token[0].isspace():
            break
        rest.append(token)
    return rest


def _token_keyframes(j: int, read: float, dropped: float | None) -> list[str]:
    """Keyframes of one token: hidden, shown when read, and faint once it is dropped."""
    start, end = f"{read:.2f}%", "100%"
    text = f"{start},{end}{{opacity:1}}"
    box = f"{start}{{opacity:1;fill:var(--accent)}}{read + 1:.2f}%{{fill:var(--tint)}}"
    if dropped is None:
        box += f"{end}{{opacity:1}}"
    else:
        last, faint = f"{dropped:.2f}%", f"{min(dropped + 1.5, 100):.2f}%"
        text = f"{start},{last}{{opacity:1}}{faint},{end}{{opacity:.28}}"
        box += f"{last}{{opacity:1}}{faint},{end}{{opacity:0}}"
    before = f"0%,{max(read - 0.01, 0):.2f}%{{opacity:0}}" if read else ""
    return [f"@keyframes t{j}{{{before}{text}}}@keyframes b{j}{{{before}{box}}}\n"]


def _token_group(j: int, token: PlacedToken, dropped: bool) -> str:
    x, y = MARGIN + token.column * CHARACTER, MARGIN + token.line * LINE
    width = token.width * CHARACTER
    length = f' textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"' if token.width else ""
    name = ' class="gone"' if dropped else ""
    return (
        f"<g{name}>"
        f'<rect class="box" style="--n:b{j}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{LINE - 4}" rx="3"/>'
        f'<text style="--n:t{j}" x="{x:.1f}" y="{y + SIZE + 1:.1f}"{length}>'
        f"{escape(token.text)}</text></g>"
    )


def _bar_keyframes(name: str, moment: np.ndarray, shares: np.ndarray) -> str:
    """Keyframes of a bar whose length follows `shares`, with at most 120 stops."""
    sampled = sorted({*np.linspace(0, len(shares) - 1, 120).astype(int).tolist()})
    stops = [f"{moment[k]:.2f}%{{transform:scaleX({shares[k]:.4f})}}" for k in sampled]
    stops.append(f"100%{{transform:scaleX({shares[-1]:.4f})}}")
    return f"@keyframes {name}{{{''.join(stops)}}}\n"


def _bars(width: float, height: float, about: str, kept: float) -> str:
    room, left, top = width - 2 * MARGIN - 120, MARGIN + 120, height - 52
    rows = []
    bars = (("a dense cache", "dense", 1.0), ("this layer", "kept", kept))
    for i, (name, css, share) in enumerate(bars):
        y = top + 18 * i
        rows.append(
            f'<text class="label" x="{MARGIN}" y="{y + 9}">{name}</text>'
            f'<rect class="room" x="{left}" y="{y}" width="{room:.0f}" height="9" rx="3"/>'
            f'<rect class="bar {css}" x="{left}" y="{y}" width="{room:.0f}" height="9" rx="3" '
            f'style="--n:{css};transform-origin:{left}px 0;transform:scaleX({share:.4f})"/>'
        )
    return "".join(rows) + f"<title>{escape(about)}</title>"
