"""The dashboard and the alerts name what is served; the script that says so finds what is wrong."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location(
        "check_dashboards", ROOT / "scripts/check_dashboards.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_all_expressions_name_what_is_served(check, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_dashboards.py"])
    check.main()
    assert int(capsys.readouterr().out.split()[0]) > 50


# of parts that most servers do not have
OPTIONAL = ("kvprune:snapshot_store_",)


def test_every_metric_is_shown(check):
    """A new metric comes with a panel."""
    shown = {
        name
        for file in check.FILES
        for _, expression in check.expressions(file)
        for name in check.parse(expression).metrics
    }
    families = {name.removesuffix("_count").removesuffix("_sum").removesuffix("_bucket")
                for name in check.served() if not name.endswith("_created")}  # fmt: skip
    covered = {name for name in families if any(other.startswith(name) for other in shown)}
    assert {name for name in families - covered if not name.startswith(OPTIONAL)} == set()


def test_names_of_every_kind_of_metric(check):
    names = check.served()
    assert names["kvprune:engine_alive"] == set()
    assert names["kvprune:kv_slots_live"] == {"layer"}
    assert names["kvprune:http_responses_total"] == {"status"}
    assert names["kvprune:request_success_total"] == {"finished_reason", "model"}
    assert names["kvprune:time_to_first_token_seconds_bucket"] == {"le", "model"}
    assert "kvprune:time_to_first_token_seconds" not in names
    assert "kvprune:http_responses" not in names


ALIVE = "kvprune:engine_alive"
WRONG = {
    f"{ALIVE} == 0 and {ALIVE}x > 1": ["kvprune:engine_alivex is not served"],
    "rate(kvprune:http_responses[5m])": ["kvprune:http_responses is not served"],
    "kvprune:time_to_first_token_seconds_total": [
        "kvprune:time_to_first_token_seconds_total is not served"
    ],
    f'{ALIVE}{{job="a", layer="1"}}': ["kvprune:engine_alive has no label layer"],
    f"sum by (status, instance) ({ALIVE})": ["no metric has the label status"],
    f"sum({ALIVE}) by (status)": ["no metric has the label status"],
    f"deriv({ALIVE}[5m])": ["deriv is no function"],
    "histogram_quantile(0.5, sum(rate(kvprune:inter_token_latency_seconds_bucket[1m])))": [
        "histogram_quantile needs le in by (...)"
    ],
    f"sum({ALIVE}": ["a ( has no other half"],
    f"sum({ALIVE}))": [") has no other half"],
    f'{ALIVE}{{job="a"': ["a } is missing"],
    f'{ALIVE}{{job "a"}}': ['job "a" are no matchers'],
    f"{ALIVE} ? 1": ["'? 1' is no part of an expression"],
    "1 + 2": ["it names no metric"],
    "label_values(kvprune:engine_alive, layer)": ["no metric has the label layer"],
}
RIGHT = [
    "up == 0",
    f"{ALIVE} offset 5m",
    f'sum without (instance) ({ALIVE}{{job=~"$job", instance!=""}}) > bool 0.5',
    'label_values(kvprune:info{job=~"$job"}, model)',
    "rate(kvprune:tokens_dropped_total[$__rate_interval]) / on (layer) kvprune:kv_slots_live",
]


@pytest.mark.parametrize("expression", WRONG)
def test_what_is_wrong_is_found(check, expression):
    assert list(check.problems(expression, check.served())) == WRONG[expression]


@pytest.mark.parametrize("expression", RIGHT)
def test_what_is_right_passes(check, expression):
    assert list(check.problems(expression, check.served())) == []


def test_the_dashboard_is_whole(check):
    board = json.loads((ROOT / "deploy/dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    boxes = [panel["gridPos"] for panel in panels]
    cells = [(x, y) for box in boxes for x in range(box["x"], box["x"] + box["w"])
             for y in range(box["y"], box["y"] + box["h"])]  # fmt: skip
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    text = json.dumps(board)
    assert {v["name"] for v in board["templating"]["list"]} == {"source", "job", "instance"}
    for panel in panels:
        assert [t["refId"] for t in panel["targets"]] == list("ABCDE"[: len(panel["targets"])])
        for target in panel["targets"]:
            # whoever chooses one instance sees that one alone
            assert target["expr"].count("kvprune:") == target["expr"].count('instance=~"$instance"')
    assert "http://" not in text
    assert "https://" not in text
