"""The code of the guide of caches runs as it stands, on the package's small model."""

import re
from pathlib import Path

import kvprune
from helpers import uneven_gates
from kvprune import tiny
from kvprune.adapters.pretrained import load_tokenizer

GUIDE = Path(__file__).parents[2] / "docs/caches.md"


def small(name):
    assert name == "smollm2-135m"
    pruned = kvprune.attach(tiny.load_model(), kvprune.PruningConfig(rank=8))
    uneven_gates(pruned, spread=3.0)
    pruned.tokenizer = load_tokenizer("tiny")
    return pruned


def test_python_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kvprune, "load", small)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, "docs/caches.md", "exec"), names)
    said = capsys.readouterr().out
    assert "that its budget allows; every row is as it was" in said
    assert "'about': 'what you like'" in said
    assert names["batch"].tokens.tolist() == [len(names["mask"][1].nonzero())]
    assert names["cache"].seen == 0
    assert names["again"].kept.equal(names["alone"].kept)
