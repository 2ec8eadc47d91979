"""The animation: well-formed, and each token fades when it is dropped."""

import re
import xml.etree.ElementTree as ET

import pytest

import traces
from kvprune import NEVER, PruneError
from kvprune.explain.animation import COLUMNS, PAUSE, animate, cell_width, place_tokens, render

SVG = "{http://www.w3.org/2000/svg}"
ODD_TOKENS = ("<b>", "&", "\x00\x1b", "", "😀", " שלום", "\n\n", "世界", "\t", " x\n", "]]>")


def test_tokens_fade_when_they_are_dropped(tmp_path):
    trace = traces.random_trace(3, 60)
    root = ET.parse(animate(trace, tmp_path / "a.svg", layer=1)).getroot()
    style = root.find(f"{SVG}style").text
    groups = {int(g.find(f"{SVG}text").get("style").split("t")[1]): g for g in root.iter(f"{SVG}g")}
    shown = [j for j, token in enumerate(trace.tokens) if token != "\n"]
    assert sorted(groups) == shown

    def percent(step):
        return f"{step / 60 * (1 - PAUSE) * 100:.2f}%"

    for j in shown:
        frames = re.search(rf"@keyframes t{j}{{(.*?}})}}", style)[1]
        step = trace.drop_step[1, j]
        if step == NEVER:
            assert frames.endswith(f"{percent(j)},100%{{opacity:1}}")
            assert groups[j].get("class") is None
        else:
            assert f"{percent(j)},{percent(step)}{{opacity:1}}" in frames
            assert frames.endswith("100%{opacity:.28}")
            assert groups[j].get("class") == "gone"
    # the final length of the bar is the share that the layer holds
    assert f"100%{{transform:scaleX({trace.kept[1, -1] / 60:.4f})}}" in style
    about = f"layer 1 holds {trace.kept[1, -1]} of 60 tokens at the end"
    assert root.find(f"{SVG}title").text == about


def test_odd_tokens_give_well_formed_svg():
    root = ET.fromstring(render(traces.random_trace(1, len(ODD_TOKENS), tokens=ODD_TOKENS)))
    texts = [text.text for g in root.iter(f"{SVG}g") for text in g.iter(f"{SVG}text")]
    assert texts == ["<b>", "&", "😀", " שלום", "世界", " ", " x", "]]>"]
    ET.fromstring(render(traces.random_trace(1, 1)))


def test_lines_break_between_words():
    tokens = tuple("word" if i % 3 else " long" for i in range(90))
    placed = place_tokens(tokens)
    assert all(token.column + token.width <= COLUMNS for token in placed)
    assert placed[-1].line > 3
    for before, after, token in zip(placed, placed[1:], tokens[1:], strict=False):
        if after.line == before.line:
            assert after.column == before.column + before.width
        else:
            assert token.startswith(" ")
            assert after.column == 0
            assert not after.text.startswith(" ")
    # a word longer than a line is broken
    assert place_tokens(("x" * 50, "y" * 50))[1].line == 1


def test_cell_width():
    texts = ("ab", "世界", "é", "e\u0301", "😀", "\u200b")
    assert [cell_width(text) for text in texts] == [2, 4, 1, 1, 2, 0]


def test_layer_and_file_name_are_checked(tmp_path):
    trace = traces.random_trace(2, 9)
    with pytest.raises(PruneError, match="layer 7"):
        render(trace, layer=7)
    with pytest.raises(PruneError, match=r"\.svg"):
        animate(trace, tmp_path / "a.gif")
    sparsest = int(trace.sparsity.mean(1).argmax())
    assert render(trace) == render(trace, layer=sparsest)
    assert "--all: 3.5s" in render(trace, seconds=3.5)
