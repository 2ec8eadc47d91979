import pytest

from kvprune import PruneError
from kvprune.evaluate.points import Points


def never():
    raise AssertionError("measured twice")


def test_a_sweep_resumes_where_it_stopped(tmp_path):
    path = tmp_path / "new" / "points.json"
    first = Points(path, {"version": 1})
    assert first.measure({"rank": 8}, lambda: [{"ppl": 3.5}]) == [{"rank": 8, "ppl": 3.5}]

    def interrupted():
        yield {"ppl": 1.0}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.measure({"rank": 16}, interrupted)
    again = Points(path, {"version": 1})
    assert again.measure({"rank": 8}, never) == [{"rank": 8, "ppl": 3.5}]
    assert {"rank": 16} not in again
    again.measure({"rank": 16}, lambda: [{"ppl": 2.0}])
    assert Points(path).rows == [{"rank": 8, "ppl": 3.5}, {"rank": 16, "ppl": 2.0}]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    points = Points(None, {"a": 1})
    points.measure({"rank": 8}, lambda: [{"ppl": 3.5}])
    assert points.measure({"rank": 8}, never) == [{"rank": 8, "ppl": 3.5}]
    group = {"setting": {"rank": 8}, "rows": [{"rank": 8, "ppl": 3.5}]}
    assert points.document == {"about": {"a": 1}, "points": [group]}
    assert not list(tmp_path.iterdir())


def test_the_order_of_names_does_not_matter(tmp_path):
    points = Points(tmp_path / "p.json")
    points.measure({"a": 1, "b": 2}, lambda: [{"c": 3}])
    assert points.measure({"b": 2, "a": 1}, never) == [{"a": 1, "b": 2, "c": 3}]


def test_rows_measured_differently_do_not_mix(tmp_path):
    Points(tmp_path / "p.json", {"steps": 100}).measure({"a": 1}, lambda: [{}])
    with pytest.raises(PruneError, match=r"steps = 100, now it is 200; measure into another file"):
        Points(tmp_path / "p.json", {"steps": 200})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"points": [{"rows": []}]}'])
def test_an_unknown_file_is_left_unchanged(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(PruneError, match="not a file of measured points"):
        Points(path)
    assert path.read_text() == text
