"""Two and four processes on the CPU give the numbers of one: evaluation bit for bit, training."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_zeroshot import write
from typer.testing import CliRunner

import model_folders
from kvprune import tiny
from kvprune.cli import app

HERE = Path(__file__).parent
LAUNCHERS = {
    # on a CPU it starts only one process, unless it expects GPUs
    2: ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    4: ("torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
}  # fmt: skip
TRAINING = (
    "--length", "32", "--log-every", "1", "--steps", "3", "--held-out", "4", "--tune",
    "interaction", "--probe-rows", "2", "--save-every", "3", "--json",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A small model and its adapter; files of the tasks; a corpus; a book."""
    path = model_folders.save(tmp_path_factory.mktemp("many"))
    write(path / "files")
    line = "In the book the cat sat on the mat, and then it slept. Nobody said why.\n"
    (path / "corpus.txt").write_text(line * 12)
    (path / "line.txt").write_text(line)
    with gzip.open(tiny.text_file("train"), "rt", encoding="utf-8") as text:
        (path / "book.txt").write_text(text.read(6_000), encoding="utf-8")
    return path


def commands(root: Path, out: Path, batch: int) -> dict[str, list[str]]:
    """Eleven windows in six batches, five in five: some processes have one more than others."""
    model = [str(root / "model"), "--adapter", str(root / "adapter")]
    text = str(root / "corpus.txt")
    line = str(root / "line.txt")
    study = ["--rows", "5", "--length", "60", "--switch", line, "--switch", line]
    train = ["--data", str(root / "book.txt"), "--cache-dir", str(root / "tokens")]
    return {
        "perplexity": ["eval", "perplexity", *model, "--data", text, "--length", "40",
                       "--max-windows", "11", "--batch", "2", "--json"],
        "stored": ["eval", "perplexity", *model, "--data", text, "--length", "40",
                   "--max-windows", "5", "--batch", "1", "--json", "--out", str(out / "stored")],
        "zeroshot": ["eval", "zeroshot", *model, "--files", str(root / "files"), "--batch", "2",
                     "--json"],
        "corpus": ["explain", *model, "--corpus", text, *study,
                   "--figures", str(out / "figures"), "--json"],
        "train": ["train", "tiny", *train, *TRAINING, "--batch", str(batch), "--out",
                  str(out / "run")],
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(root):
    out = root / "alone"
    said = {}
    threads = torch.get_num_threads()
    # sums of several threads have another last bit
    torch.set_num_threads(1)
    try:
        for name, args in commands(root, out, batch=4).items():
            done = CliRunner().invoke(app, args, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            said[name] = json.loads(done.stdout)
    finally:
        torch.set_num_threads(threads)
    return said, out


def interrupt(finished: Path, folder: Path) -> None:
    """The folder of the same measurement, as it was before its second and fourth batch."""
    points = json.loads((finished / "perplexity.points.json").read_text())
    del points["points"][3], points["points"][1]
    folder.mkdir(parents=True)
    (folder / "perplexity.points.json").write_text(json.dumps(points))


def launch(size: int, folder: Path, chosen: dict[str, list[str]]) -> list[dict[str, str]]:
    """What each process said."""
    path = f"{HERE}:{HERE.parents[1] / 'src'}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if size == 2:
        environment["ACCELERATE_USE_CPU"] = "true"
    worker = [str(HERE / "process_worker.py"), str(folder), json.dumps(chosen)]
    command = [sys.executable, "-m", *LAUNCHERS[size], *worker]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize("size", LAUNCHERS)
def test_the_numbers_of_one_process(root, alone, tmp_path, size):
    want, finished = alone
    interrupt(finished / "stored", tmp_path / "stored")
    chosen = commands(root, tmp_path, batch=4 // size)
    main, *others = launch(size, tmp_path, chosen)
    for name in ("perplexity", "stored", "zeroshot", "corpus"):
        assert json.loads(main[name]) == want[name], name
    assert json.loads(main["again"]) == want["perplexity"]
    stored = [folder / "stored/perplexity.points.json" for folder in (finished, tmp_path)]
    assert points(stored[1]) == points(stored[0])
    assert losses(tmp_path / "run") == pytest.approx(losses(finished / "run"), rel=1e-4)
    metrics = json.loads(main["train"])["metrics"]
    for name in ("eval_loss_soft", "eval_loss_hard", "eval_sparsity_soft"):
        assert metrics[name] == pytest.approx(want["train"]["metrics"][name], rel=1e-4), name
    # only the main process prints
    assert all(not other[name] for other in others for name in chosen)
    failure = "no memory left; lower --batch"
    assert others[0]["failed"] == failure
    for other in (main, *others[1:]):
        assert other["failed"] == f"process 1 of {size} failed, so all end: {failure}"
    assert main["disagreed"].startswith(f"process 1 of {size} has weights = 'new', process 0 has")
    assert others[0]["disagreed"].startswith(f"process 0 of {size} has weights = 'old', process 1")


def points(file: Path) -> list[dict]:
    found = json.loads(file.read_text())["points"]
    return sorted(found, key=lambda group: group["setting"]["windows"])


def losses(run: Path) -> list[float]:
    state = json.loads((run / "checkpoint-3/trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]
