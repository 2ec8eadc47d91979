"""Results are read back, combined, and written to a self-contained page."""

import json
import re
from html.parser import HTMLParser

import pytest

from kvprune import PruneError
from kvprune.evaluate.compare import tables as compare
from kvprune.evaluate.compare.figure import draw
from kvprune.evaluate.compare.results import best, entries, read_results, summary
from kvprune.utils import amounts, page
from kvprune.utils import plot as drawing

EVIL = "</script><img src=x onerror=alert(1)> & $x_1$"


def perplexity_rows(sparsity: float, value: float) -> list[dict]:
    rows = [(64, value + 1, sparsity / 2), (512, value - 1, sparsity), ("all", value, sparsity)]
    return [
        {"context": n, "perplexity": p, "sparsity": s, "dense_perplexity": 18.0} for n, p, s in rows
    ]


def speed_rows(sparsity: float, method: str) -> list[dict]:
    rows = []
    for context, batch in ((100, 1), (400, 1), (400, 8)):
        for side, share, seconds in (("dense", 0.0, 0.2), ("pruned", sparsity, 0.1)):
            rows.append(
                {
                    "rows": "realistic", "context": context, "batch": batch, "side": side,
                    "method": "dense" if side == "dense" else method, "sparsity": share,
                    "seconds_step": seconds, "tokens_per_second": batch / seconds,
                    "cache_bytes": int(1000 * context * batch * (1 - share)),
                    "ratio": 0.2 / seconds, "ratio_low": 1.0, "ratio_high": 3.0,
                }
            )  # fmt: skip
    return rows


@pytest.fixture
def folder(tmp_path):
    """Two adapters and a baseline on one model, as the eval commands would write them."""
    for name, method, sparsity, value in (
        ("low", "pruning", 0.4, 18.5),
        ("high", "pruning", 0.8, 19.5),
        ("window", "local", 0.6, 25.0),
        (f"odd {EVIL.replace('/', '|')}", "local", 0.7, 27.0),
    ):
        about = {"model": "tiny", "adapter": f"runs/{name}", "method": {"method": method}}
        own = tmp_path / f"{method}{sparsity}"
        own.mkdir()
        tasks = [("piqa", 0.6), ("lambada", 0.4), ("mean", 0.5)]
        zeroshot = [{"task": t, "accuracy": a, "sparsity": sparsity / 2} for t, a in tasks]
        zeroshot[1]["perplexity"] = 40.0
        for kind, rows in (
            ("perplexity", perplexity_rows(sparsity, value)), ("zeroshot", zeroshot),
        ):  # fmt: skip
            (own / f"{kind}.json").write_text(json.dumps({"about": about, "rows": rows}))
        del about["method"]
        points = [{"setting": {}, "rows": [row]} for row in speed_rows(sparsity, method)]
        (own / "throughput.json").write_text(json.dumps({"about": about, "points": points}))
        (own / "perplexity.points.json").write_text(json.dumps({"about": about, "points": points}))
        (own / "config.json").write_text('{"model_type": "gpt2"}')
    return tmp_path


def test_one_entry_for_each_model_and_adapter(folder):
    models = entries(read_results([folder]))
    assert [(e.name, e.method) for e in models[:2]] == [("tiny", "dense"), ("window", "local")]
    assert [e.name for e in models[3:]] == ["low", "high"]
    dense, high = models[0], models[-1]
    assert dense.overall == {"context": "all", "sparsity": 0.0, "perplexity": 18.0}
    assert high.overall["perplexity"] == 19.5
    assert high.accuracy == {"accuracy": 0.5, "sparsity": 0.4}
    assert high.speed["batch"] == 8


def test_a_row_of_the_summary(folder):
    models = entries(read_results([folder]))
    line = summary(models[-1], models)
    assert line == {
        "model": "high", "method": "pruning", "sparsity": 0.8, "perplexity": 19.5, "accuracy": 0.5,
        "cache_bytes_a_row": pytest.approx(1000 * 400 * 0.2, abs=1),
        "cache_ratio": pytest.approx(0.2, abs=1e-3), "tokens_per_second": 80.0,
        "speed_ratio": 2.0, "context": 400, "batch": 8,
    }  # fmt: skip


def test_what_was_not_measured_is_left_out(folder):
    rows, files = compare.compare([folder / "pruning0.4" / "zeroshot.json"])
    assert files == []
    columns, lines = compare.summary_table(rows)
    assert columns == ["model", "method", "pruned", "accuracy"]
    assert lines == [["low", "pruning", "20%", "50.0%"]]


class Checker(HTMLParser):
    """Collects tags and links; checks that tags close."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.fetched = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag not in ("meta", "path", "use", "rect"):
            self.open.append(tag)
        self.fetched += [v for k, v in attributes if k in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag, attributes):
        self.fetched += [v for k, v in attributes if k in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag


def test_the_page_is_self_contained_and_escaped(folder):
    out = folder / "out"
    _, files = compare.compare([folder], out)
    assert {f.name for f in files} == {
        "compare.html", "compare.json", "compare.png", "compare.svg",
    }  # fmt: skip
    assert all(file.stat().st_size > 500 for file in files)
    html = (out / "compare.html").read_text()
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    assert "script" not in checker.seen
    assert "img" not in checker.seen
    assert all(link.startswith("#") for link in checker.fetched)
    assert "odd &lt;|script&gt;" in html
    assert "var(--ink)" in html
    assert drawing.INK not in html
    for word in ("Perplexity by context", "Zero-shot accuracy", "Throughput", "piqa"):
        assert word in html
    # its own output is not read, and a second run writes the same: no dates, no random ids
    assert len(read_results([folder])) == 12
    compare.compare([folder], folder / "again")
    for name in ("compare.html", "compare.svg"):
        assert (folder / "again" / name).read_bytes() == (out / name).read_bytes()


def test_one_panel_per_metric(folder):
    results = read_results([folder])
    figure = draw(entries(results), results)
    titles = [axis.get_title("left") for axis in figure.axes]
    assert titles == ["Perplexity", "Zero-shot accuracy", "Cache against dense",
                      "Speed against dense"]  # fmt: skip
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert lines["pruning"] == [[40.0, 18.5], [80.0, 19.5]]
    assert lines["dense"] == [[0.0, 18.0]]
    only = read_results([folder / "pruning0.4" / "zeroshot.json"])
    assert draw(entries(only), only) is None


def test_cost_and_ideal_rows_are_drawn(folder, tmp_path):
    from kvprune.evaluate.cost.formulas import cost
    from kvprune.evaluate.cost.shape import read_shape
    from kvprune.evaluate.points import Points

    points = Points(None, {"model": "tiny"})
    points.measure({}, lambda: cost(read_shape("tiny"), (0.0, 0.5, 0.8), (100, 400)))
    points.write(folder / "cost" / "cost.json")
    ideal = [{**row, "rows": "ideal", "at": 0.8} for row in speed_rows(0.8, "pruning")]
    ideal[-1]["ratio"] = 2.5
    saved = {"about": {"model": "tiny"}, "rows": ideal}
    (folder / "ideal.json").write_text(json.dumps(saved))
    results = read_results([folder / "cost", folder / "ideal.json"])
    models = entries(results)
    figure = draw(models, results)
    lines = {
        line.get_label(): line.get_xydata().tolist() for axis in figure.axes for line in axis.lines
    }
    formula = [row["cache_ratio"] for row in points.rows if row["context"] == 400][1:]
    assert lines["by formula"] == [[0.0, formula[0]], [50.0, formula[1]], [80.0, formula[2]]]
    assert lines["pruned, ideal rows"] == [[80.0, 2.5]]
    # ideal rows are not decisions of a model
    assert [entry.method for entry in models] == ["dense"]
    assert {row["side"] for row in models[0].speeds} == {"dense"}
    html = compare.page_of(results, models, figure)
    assert "Cost by formula: tiny" in html


def test_the_best_batch_of_each_side():
    rows = speed_rows(0.5, "pruning")
    rows[-1]["tokens_per_second"] = 5.0  # the large batch is slower for the pruned side
    best_rows = {(r["context"], r["side"]): r for r in best(rows)}
    assert best_rows[400, "pruned"]["batch"] == 1
    assert best_rows[400, "dense"]["batch"] == 8
    assert best_rows[400, "pruned"]["best_ratio"] == 10.0 / 40.0
    assert best_rows[100, "dense"]["best_ratio"] == 1.0


@pytest.mark.parametrize("text", ["", "[]", '{"about": {}}', '{"about": {}, "rows": []}',
                                  '{"about": {}, "rows": [{"x": 1}]}'])  # fmt: skip
def test_files_without_results(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(PruneError, match=r"x.json holds no results"):
        read_results([file])
    with pytest.raises(PruneError, match="holds no results of kvprune eval; pass its --out"):
        read_results([tmp_path])
    with pytest.raises(PruneError, match="does not exist"):
        read_results([tmp_path / "nowhere"])


def test_names_are_as_short_as_unique(tmp_path):
    for number, adapter in enumerate(("a/run", "b/run", "c/other")):
        about = {"model": "m", "adapter": adapter, "method": {"method": "pruning"}}
        saved = {"about": about, "rows": perplexity_rows(0.1 * number, 20)}
        (tmp_path / f"{number}.json").write_text(json.dumps(saved))
    names = {entry.name for entry in entries(read_results([tmp_path]))}
    assert names == {"m", "a/run", "b/run", "other"}


def test_all_text_on_a_page_is_escaped():
    html = page.page(EVIL, [page.heading(EVIL), page.note(EVIL), page.table([EVIL], [[EVIL]]),
                            page.details(EVIL, {EVIL: EVIL})])  # fmt: skip
    assert "<img" not in html
    assert "</script>" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;") >= 8


def test_figures_escape_any_name():
    figure, (axis,) = drawing.panels([EVIL])
    drawing.line(axis, 0, [1, 2], [1, 2], "_" + EVIL)
    drawing.legend(axis)
    drawing.heading(figure, EVIL)
    svg = drawing.inline(figure, "x")
    assert "<img" not in svg
    assert svg.count("&lt;img") == 3
    assert svg.count("$x_1$") == 3  # no formula
    assert not re.search(r"<metadata|<!DOCTYPE", svg)


def test_amounts():
    assert [amounts.size(x) for x in (0, 1023, 1024, 1.5 * 2**20, 200 * 2**30)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 MiB", "200 GiB",
    ]  # fmt: skip
    assert [amounts.operations(x) for x in (0, 999, 12_345, 1.23e9)] == [
        "0", "999", "12.3 K", "1.23 G",
    ]  # fmt: skip
