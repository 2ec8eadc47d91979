"""A reading as a moving picture: one SVG that READMEs and slides can show."""

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

# a monospaced character is 0.6 em wide in every common font; textLength makes it so in the others
SIZE, CHARACTER, LINE, MARGIN, COLUMNS = 15, 9.0, 26, 24, 84
PAUSE = 0.2  # of the whole, at the end, to look at what is left
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
class Placed:
    """Where a token stands: a box of so many characters in a line."""

    column: int
    line: int
    width: int
    text: str


def animate(
    trace: Trace, path: str | Path, layer: int | None = None, seconds: float | None = None
) -> Path:
    """Write the SVG: tokens appear as they are read and fade as one layer drops them.

    layer: its number in the model; by default the one that drops most. Without motion, where a
    reader has asked for none, it shows the end.
    """
    file = Path(path)
    if file.suffix != ".svg":
        raise PruneError(f"{file} does not end in .svg; the animation is one")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, draw(trace, layer, seconds).encode())
    return file


def draw(trace: Trace, layer: int | None = None, seconds: float | None = None) -> str:
    """The SVG as text."""
    if layer is None:
        place = int(trace.sparsity.mean(1).argmax())
    elif layer in trace.layers:
        place = trace.layers.index(layer)
    else:
        raise PruneError(f"layer {layer} is not in the trace; it has {trace.layers}")
    T = len(trace.tokens)
    seconds = seconds or min(40.0, 4 + T / 8)
    if not seconds > 0:
        raise PruneError(f"seconds={seconds} must be more than 0")
    # when token k is read, as a share of the whole; the end is held for a while
    moment = np.arange(T + 1) / max(T, 1) * (1 - PAUSE) * 100
    placed = place_tokens(trace.tokens)
    height = (max(token.line for token in placed) + 1) * LINE + 2 * MARGIN + 52
    width = COLUMNS * CHARACTER + 2 * MARGIN
    keyframes, tokens = [], []
    for j, token in enumerate(placed):
        if not token.text:
            continue
        step = int(trace.drop_step[place, j])
        keyframes += _life(j, moment[j], moment[step] if step < NEVER else None)
        tokens.append(_token(j, token, step < NEVER))
    kept = trace.kept[place] / T
    keyframes.append(_growth("dense", moment, (np.arange(T) + 1) / T))
    keyframes.append(_growth("kept", moment, kept))
    about = f"layer {trace.layers[place]} holds {trace.kept[place, -1]} of {T} tokens at the end"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" role="img" aria-label="A text being read: {about}">'
        f"<style>{STYLE}:root {{ --all: {seconds:.1f}s }}\n{''.join(keyframes)}</style>"
        f'<rect class="paper" width="100%" height="100%" rx="10"/>'
        f"{''.join(tokens)}{_bars(width, height, about, float(kept[-1]))}</svg>\n"
    )


def place_tokens(tokens: tuple[str, ...]) -> list[Placed]:
    """Break the text into lines between words, as a page would."""
    placed: list[Placed] = []
    column = line = 0
    for i, token in enumerate(tokens):
        # XML has no control characters
        shown = "".join(c for c in token.replace("\t", " ") if unicodedata.category(c) != "Cc")
        breaks = token.count("\n")
        if breaks and not shown:
            # an empty line for a paragraph, and no more
            line, column = line + min(breaks, 2), 0
            placed.append(Placed(0, line, 0, ""))
            continue
        width = cells(shown)
        word = width + sum(cells(part) for part in _rest_of_word(tokens, i))
        starts_word = not _continues(tokens, i)
        if column and column + (min(word, COLUMNS) if starts_word else width) > COLUMNS:
            line, column = line + 1, 0
        if column == 0 and shown.startswith(" "):
            shown = shown[1:]
            width = cells(shown)
        placed.append(Placed(column, line, width, shown))
        column += width
        if breaks:
            line, column = line + 1, 0
    return placed


def cells(text: str) -> int:
    """How many character cells a text takes: wide characters two, combining marks none."""
    return sum(
        0 if unicodedata.combining(c) or unicodedata.category(c) == "Cf"
        else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )  # fmt: skip


def _continues(tokens: tuple[str, ...], i: int) -> bool:
    return i > 0 and not tokens[i][:1].isspace() and not tokens[i - 1][-1:].isspace()


def _rest_of_word(tokens: tuple[str, ...], i: int) -> list[str]:
    rest = []
    for token in tokens[i + 1 :]:
        if not token or token[0].isspace():
            break
        rest.append(token)
    return rest


def _life(j: int, read: float, dropped: float | None) -> list[str]:
    """Keyframes of one token: not yet, there, and, if it is dropped, faint from then on."""
    there, end = f"{read:.2f}%", "100%"
    text = f"{there},{end}{{opacity:1}}"
    box = f"{there}{{opacity:1;fill:var(--accent)}}{read + 1:.2f}%{{fill:var(--tint)}}"
    if dropped is None:
        box += f"{end}{{opacity:1}}"
    else:
        last, faint = f"{dropped:.2f}%", f"{min(dropped + 1.5, 100):.2f}%"
        text = f"{there},{last}{{opacity:1}}{faint},{end}{{opacity:.28}}"
        box += f"{last}{{opacity:1}}{faint},{end}{{opacity:0}}"
    before = f"0%,{max(read - 0.01, 0):.2f}%{{opacity:0}}" if read else ""
    return [f"@keyframes t{j}{{{before}{text}}}@keyframes b{j}{{{before}{box}}}\n"]


def _token(j: int, token: Placed, gone: bool) -> str:
    x, y = MARGIN + token.column * CHARACTER, MARGIN + token.line * LINE
    width = token.width * CHARACTER
    length = f' textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs"' if token.width else ""
    name = ' class="gone"' if gone else ""
    return (
        f"<g{name}>"
        f'<rect class="box" style="--n:b{j}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{LINE - 4}" rx="3"/>'
        f'<text style="--n:t{j}" x="{x:.1f}" y="{y + SIZE + 1:.1f}"{length}>'
        f"{escape(token.text)}</text></g>"
    )


def _growth(name: str, moment: np.ndarray, shares: np.ndarray) -> str:
    """A bar that is so long when each token has been read; at most 120 stops."""
    chosen = sorted({*np.linspace(0, len(shares) - 1, 120).astype(int).tolist()})
    stops = [f"{moment[k]:.2f}%{{transform:scaleX({shares[k]:.4f})}}" for k in chosen]
    stops.append(f"100%{{transform:scaleX({shares[-1]:.4f})}}")
    return f"@keyframes {name}{{{''.join(stops)}}}\n"


def _bars(width: float, height: float, about: str, kept: float) -> str:
    room, left, top = width - 2 * MARGIN - 120, MARGIN + 120, height - 52
    rows = []
    both = (("a dense cache", "dense", 1.0), ("this layer", "kept", kept))
    for i, (name, css, share) in enumerate(both):
        y = top + 18 * i
        rows.append(
            f'<text class="label" x="{MARGIN}" y="{y + 9}">{name}</text>'
            f'<rect class="room" x="{left}" y="{y}" width="{room:.0f}" height="9" rx="3"/>'
            f'<rect class="bar {css}" x="{left}" y="{y}" width="{room:.0f}" height="9" rx="3" '
            f'style="--n:{css};transform-origin:{left}px 0;transform:scaleX({share:.4f})"/>'
        )
    return "".join(rows) + f"<title>{escape(about)}</title>"
