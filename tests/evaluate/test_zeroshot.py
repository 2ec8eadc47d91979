"""Zero-shot tasks through lm-eval, against its own model and against requests read one by one."""

import gzip
import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import datasets
import pytest
import torch
from lm_eval import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from test_cli_eval import cli

import kvprune
import model_folders
from kvprune import PruneError
from kvprune.adapters.load import load_with_tokenizer
from kvprune.evaluate.zeroshot import tasks
from kvprune.evaluate.zeroshot.lm import PrunedLM, batches
from kvprune.evaluate.zeroshot.run import HUB, load_task, run, zeroshot

ROWS = {
    "winogrande": [
        {"sentence": f"The {a} did not fit the {b} as the _ was too {c}.", "option1": a,
         "option2": b, "answer": str(1 + i % 2)}
        for i, (a, b, c) in enumerate([("cup", "box", "big"), ("sofa", "door", "small"),
                                       ("ring", "finger", "wide"), ("book", "bag", "tall")])
    ],
    "hellaswag": [
        {"activity_label": "Baking", "ctx_a": f"A man takes {n} eggs.", "ctx_b": "he",
         "endings": ["breaks them [step] all.", "is a tree.", "sings", "went home  late."],
         "label": str(n % 4), "query": f"Baking: A man takes {n} eggs. He"}
        for n in range(4)
    ],
    "piqa": [
        {"goal": f"open {thing}", "sol1": "pull the lid", "sol2": "pull the lid off and on",
         "label": i % 2}
        for i, thing in enumerate(["a jar", "the red tin can", "wine"])
    ],
    "lambada": [
        {"text": f"She {verb} the door and he came in. He saw that she had not {verb} the door"}
        for verb in ("shut", "closed", "painted")
    ],
}  # fmt: skip


def write(folder: Path, **changed: list) -> Path:
    folder.mkdir(exist_ok=True)
    for task, rows in (ROWS | changed).items():
        with gzip.open(folder / f"{task}_dev.jsonl.gz", "wt") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = model_folders.save(tmp_path_factory.mktemp("zeroshot"))
    write(path / "files")
    return path


def samples(lm, task: str, files: Path) -> list:
    """lm-eval's record of every sample: loglikelihoods, greedy or not, metrics."""
    name, loaded = load_task(task, files)
    return evaluate(lm, loaded, bootstrap_iters=0)["samples"][name]


@pytest.mark.parametrize("task", HUB)
def test_dense_agrees_with_lm_evals_own_model_on_every_sample(root, task):
    want = samples(HFLM(str(root / "model"), device="cpu", batch_size=3), task, root / "files")
    untouched = PrunedLM(str(root / "model"), device="cpu", batch_size=3)
    opened = load_with_tokenizer(str(root / "model"))
    object.__setattr__(opened, "model", kvprune.attach(opened.host, kvprune.DenseConfig()))
    for lm in (untouched, PrunedLM(opened, batch_size=3)):
        got = samples(lm, task, root / "files")
        assert len(got) == len(want) == len(ROWS[task])
        for sample, expected in zip(got, want, strict=True):
            assert sample["arguments"] == expected["arguments"]
            assert sample["acc"] == expected["acc"]
            pairs = zip(sample["resps"], expected["resps"], strict=True)
            for [(value, greedy)], [(want_value, want_greedy)] in pairs:
                assert float(value) == pytest.approx(float(want_value), abs=1e-4)
                assert greedy == want_greedy
        assert lm.sparsity == 0


class Alone:
    """One request read without a batch or padding."""

    def __init__(self, pruned: kvprune.Pruned, context: str, continuation: str):
        encode = model_folders.byte_tokenizer()
        start, ids = len(encode(context)["input_ids"]), encode(context + continuation)["input_ids"]
        with torch.no_grad(), pruned.evaluating():
            log_p = (
                pruned.model(torch.tensor([ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
            )
        scored = range(start - 1, len(ids) - 1)
        self.loglikelihood = sum(float(log_p[t, ids[t + 1]]) for t in scored)
        steps = pruned.trace(ids[:-1])[:, 0].tolist()
        gone = [sum(s <= t for s in layer[:t]) / t for layer in steps for t in scored]
        self.sparsity = sum(gone) / len(gone)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("task", HUB)
def test_pruned_equals_each_request_read_alone(root, task, batch):
    lm = PrunedLM(str(root / "model"), str(root / "adapter"), device="cpu", batch_size=batch)
    got = samples(lm, task, root / "files")
    alone = []
    for sample in got:
        for (context, continuation), [(value, _)] in zip(
            sample["arguments"], sample["resps"], strict=True
        ):
            alone.append(Alone(lm.pruned, context, continuation))
            assert float(value) == pytest.approx(alone[-1].loglikelihood, abs=1e-3)
    assert sorted(lm.sparsities) == pytest.approx(sorted(one.sparsity for one in alone), abs=1e-6)
    assert len(set(lm.sparsities)) > 1


def test_requests_that_share_a_pass_count_separately(root):
    lm = PrunedLM(str(root / "model"), str(root / "adapter"), device="cpu", batch_size=4)
    ids = model_folders.byte_tokenizer()("one of two")["input_ids"]
    requests = [(("", str(i)), ids, [5 + i]) for i in range(3)]
    requests.append((("", "x"), ids[:4], ids[4:]))
    lm._loglikelihood_tokens(requests, disable_tqdm=True)
    assert len(lm.sparsities) == 4
    assert len(set(lm.sparsities[:3])) == 1
    steps = lm.pruned.trace(ids)[:, 0].tolist()
    t = len(ids) - 1
    want = sum(sum(s <= t for s in layer[:t]) / t for layer in steps) / len(steps)
    assert lm.sparsities[0] == pytest.approx(want)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_batches_of_a_group_are_those_of_one_process(root, monkeypatch, size):
    """What the model reads, batch by batch, padding and all."""
    lm = PrunedLM(str(root / "model"), str(root / "adapter"), device="cpu", batch_size=size)
    draw = random.Random(size)
    ids = model_folders.byte_tokenizer()("a text of some length")["input_ids"]
    cuts = [(draw.randint(1, 12), draw.randint(13, 20)) for _ in range(9)]
    requests = [(("", str(i)), ids[:a], ids[a:b]) for i, (a, b) in enumerate(cuts)]
    # and some that differ in their last token alone
    requests += [(("", f"last {i}"), ids[:7], [5 + i]) for i in range(4)]
    requests += [(("", "again"), ids[:6], [ids[6], 90])]
    draw.shuffle(requests)
    read, call = [], PrunedLM._model_call
    monkeypatch.setattr(
        PrunedLM, "_model_call", lambda lm, inps, **other: read.append(inps) or call(lm, inps)
    )
    want = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    alone = [inps.tolist() for inps in read]
    read.clear()
    parts = batches(requests, size)
    got = {}
    for part in parts:
        scored = lm._score([requests[number] for number in part], disable_tqdm=True)
        got |= dict(zip(part, scored, strict=True))
    assert [inps.tolist() for inps in read] == alone
    assert [got[number][0] for number in range(len(requests))] == want
    assert [got[number][1] for number in range(len(requests))] == lm.sparsities


@pytest.mark.parametrize("task", HUB)
def test_prompts_are_those_of_lm_eval(root, task, monkeypatch):
    rows = datasets.Dataset.from_list(ROWS[task])
    splits = dict.fromkeys(("train", "validation", "test"), rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda **_: splits)

    def prompts(files):
        name, loaded = load_task(task, files)
        loaded["tasks"][name].build_all_requests(rank=0, world_size=1)
        return [request.args for request in loaded["tasks"][name].instances]

    assert prompts(root / "files") == prompts(None)
    original = [
        {name: value for name, value in row.items() if name != "query"} for row in ROWS["hellaswag"]
    ]
    files = write(root / "original", hellaswag=original)
    assert prompts(files) == prompts(None)


def test_a_table_of_all_tasks_and_their_mean(root, tmp_path):
    lm = PrunedLM(str(root / "model"), str(root / "adapter"), device="cpu", batch_size=4)
    rows = zeroshot(lm, files=root / "files")
    assert [row.task for row in rows] == [*HUB, "mean"]
    for row in rows[:-1]:
        lm.sparsities = []
        right = [sample["acc"] for sample in samples(lm, row.task, root / "files")]
        assert row.sparsity == pytest.approx(lm.sparsity)
        assert row.samples == len(right)
        assert row.accuracy == sum(right) / len(right)
        p, n = row.accuracy, len(right)
        assert row.stderr == pytest.approx((p * (1 - p) / (n - 1)) ** 0.5)
    assert rows[-1].accuracy == pytest.approx(sum(row.accuracy for row in rows[:-1]) / 4)
    assert rows[-1].sparsity == pytest.approx(sum(row.sparsity for row in rows[:-1]) / 4)
    assert {row.task for row in rows if row.accuracy_norm is not None} == {"hellaswag", "piqa"}
    assert [row.samples for row in zeroshot(lm, ["piqa"], files=root / "files", limit=2)] == [2, 2]


def test_a_finished_task_is_not_repeated(root, tmp_path, monkeypatch):
    args = ["zeroshot", root / "model", "--adapter", root / "adapter", "--files", root / "files",
            "--limit", 2, "--out", tmp_path / "o", "--json"]  # fmt: skip
    first = json.loads(cli(*args, "--tasks", "piqa"))
    assert [row["task"] for row in first["rows"]] == ["piqa", "mean"]
    assert first["about"]["limit"] == 2
    scored = []
    score = kvprune.evaluate.zeroshot.run._score
    monkeypatch.setattr(
        "kvprune.evaluate.zeroshot.run._score",
        lambda lm, task, *rest: scored.append(task) or score(lm, task, *rest),
    )
    second = json.loads(cli(*args, "--tasks", "piqa,lambada"))
    assert scored == ["lambada"]
    assert second["rows"][0] == first["rows"][0]
    assert json.loads((tmp_path / "o/zeroshot.json").read_text()) == second
    out = cli("zeroshot", root / "model", "--files", root / "files", "--tasks", "winogrande")
    assert "winogrande" in out
    assert "100.00%" in out or "%" in out


def test_a_limit_for_one_task_leaves_the_others_complete(root, tmp_path):
    args = ["zeroshot", root / "model", "--files", root / "files", "--tasks", "piqa,lambada",
            "--out", tmp_path / "o", "--json"]  # fmt: skip
    one = json.loads(cli(*args, "--limit", "piqa=2"))
    assert {row["task"]: row["samples"] for row in one["rows"]} == {
        "piqa": 2, "lambada": len(ROWS["lambada"]), "mean": 2 + len(ROWS["lambada"]),
    }  # fmt: skip
    assert one["about"]["limit"] == {"piqa": 2}
    both = json.loads(cli(*args, "--limit", "piqa=2,lambada=1"))
    assert [row["samples"] for row in both["rows"]] == [2, 1, 3]
    each = json.loads(cli(*args, "--limit", "2"))
    assert [row["samples"] for row in each["rows"]] == [2, 2, 4]
    assert each["about"]["limit"] == 2
    assert each["rows"][0] == both["rows"][0]


@pytest.mark.parametrize(("limit", "match"), [
    ("piqa=", "'piqa=' must be a number, or one per task"),
    ("many", "'many' must be a number"),
    ("arc=3", "task 'arc' is unknown"),
    ("hellaswag=3", "limit of 3 for hellaswag, which is not among the tasks"),
    ("piqa=0", "0 rows of piqa are too few"),
    ("-1", "-1 rows of piqa are too few"),
])  # fmt: skip
def test_a_bad_limit_is_explained(root, limit, match):
    with pytest.raises(PruneError, match=match):
        cli("zeroshot", root / "model", "--files", root / "files", "--tasks", "piqa",
            "--limit", limit)  # fmt: skip


BAD = [
    ("piqa", {"sol2": None}, r"'sol2' in .*piqa_dev.jsonl.gz, row 2 is None; it must be text"),
    ("piqa", {"label": 2}, r"'label' in .*row 2 is 2; it must be 0 or 1"),
    ("winogrande", {"answer": ""}, r"'answer' in .*row 2 is ''; it must be 1 or 2"),
    ("winogrande", {"sentence": "no gap"}, r"'sentence' in .*row 2 must have one _"),
    ("hellaswag", {"endings": "one"}, r"row 2 has no list of texts in the field 'endings'"),
    ("hellaswag", {"label": "4"}, r"'label' in .*row 2 is '4'; it must be 0 or 1 or 2 or 3"),
    ("lambada", {"text": "word"}, r"'text' in .*row 2 is one word"),
]


@pytest.mark.parametrize(("task", "change", "match"), BAD)
def test_a_bad_row_is_named(tmp_path, task, change, match):
    rows = [dict(row) for row in ROWS[task]]
    rows[1] |= change
    with pytest.raises(PruneError, match=match):
        tasks.read(write(tmp_path, **{task: rows}), task)


@pytest.mark.parametrize(("task", "field"), [
    ("piqa", "goal"), ("piqa", "label"), ("winogrande", "option1"), ("winogrande", "answer"),
    ("hellaswag", "label"), ("lambada", "text"),
])  # fmt: skip
def test_a_missing_field_is_named(tmp_path, task, field):
    rows = [dict(row) for row in ROWS[task]]
    del rows[2][field]
    with pytest.raises(PruneError, match=rf"{task}_dev.jsonl.gz, row 3 has no field '{field}'"):
        tasks.read(write(tmp_path, **{task: rows}), task)


def test_bad_files_are_explained(root, tmp_path, monkeypatch):
    def fails(match, files, task="piqa"):
        with pytest.raises(PruneError, match=match):
            run(str(root / "model"), tasks=[task], files=files)

    fails("nowhere is no folder", tmp_path / "nowhere")
    fails(r"must hold one file piqa\* .*; found: none", tmp_path)
    (tmp_path / "piqa.jsonl").write_text("")
    fails("piqa.jsonl holds no rows", tmp_path)
    (tmp_path / "piqa.jsonl").write_text('{"goal":\n')
    fails("piqa.jsonl, line 1 is not JSON", tmp_path)
    (tmp_path / "piqa.jsonl").write_text("[1]\n")
    fails("row 1 is list, not an object", tmp_path)
    (tmp_path / "piqa_2.jsonl.gz").write_text("not gzip")
    fails("found: piqa.jsonl, piqa_2.jsonl.gz", tmp_path)
    (tmp_path / "piqa.jsonl").unlink()
    fails("piqa_2.jsonl.gz cannot be read", tmp_path)
    fails("task 'arc' is unknown; there are winogrande", tmp_path, "arc")
    monkeypatch.setattr(datasets, "load_dataset", lambda **_: 1 / 0)
    fails("piqa cannot be read from the hub: ZeroDivisionError: .* as --files", None)
    with pytest.raises(PruneError, match="where are the files of piqa"):
        TaskManager(include_path=str(tasks.FOLDER), include_defaults=False).load(["kvprune_piqa"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    fails(r"need the package lm-eval .*; pip install 'kvprune\[eval\]'", None)


def test_lm_evals_own_command_knows_the_model(root, monkeypatch):
    """The task's file imports kvprune before lm-eval looks for the model."""
    import lm_eval.evaluator
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    monkeypatch.delitem(sys.modules, "kvprune.evaluate.zeroshot.tasks")
    monkeypatch.delitem(model_registry._objs, "kvprune")
    # it would scan all of its tasks and query pip: minutes
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    monkeypatch.setattr(sys, "argv", [
        "lm_eval", "--model", "kvprune", "--model_args",
        f"pretrained={root / 'model'},adapter={root / 'adapter'}",
        "--tasks", str(tasks.FOLDER / "piqa.yaml"),
        "--metadata", json.dumps({"files": str(root / "files")}),
        "--device", "cpu", "--batch_size", "2", "--output_path", str(root / "results"),
    ])  # fmt: skip
    cli_evaluate()
    (file,) = (root / "results").rglob("results*.json")
    got = json.loads(file.read_text())
    lm = PrunedLM(str(root / "model"), str(root / "adapter"), device="cpu", batch_size=2)
    want = zeroshot(lm, ["piqa"], files=root / "files")[0]
    assert got["results"]["kvprune_piqa"]["acc,none"] == want.accuracy
    assert got["config"]["sparsity"] == pytest.approx(want.sparsity)
    assert want.sparsity > 0


def test_lm_eval_still_knows_its_own_models():
    """It fills its registry only while that is empty, so this needs a new process."""
    code = """
import kvprune.evaluate.zeroshot.tasks, sys
from lm_eval.api.registry import model_registry
print("kvprune" in model_registry, "hf" in model_registry, "torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["True", "True", "False"], result.stderr


def test_our_command_forwards_all_options_to_lm_eval(monkeypatch):
    import lm_eval.__main__
    from lm_eval.api.registry import get_model

    monkeypatch.setattr(sys, "argv", ["kvprune"])
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: print(json.dumps(sys.argv)))
    out = cli("lm-eval", "--model_args", "pretrained=tiny", "--tasks", "arc_easy", "--help")
    assert json.loads(out) == [
        "lm_eval", "--model", "kvprune", "--model_args", "pretrained=tiny", "--tasks", "arc_easy",
        "--help",
    ]  # fmt: skip
    assert get_model("kvprune") is PrunedLM
