"""A run that is killed and resumed ends where one that was not ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.testing import assert_close
from transformers import TrainerCallback

import training_runs as runs

SETTINGS = {
    "steps": 8, "save_every": 3, "eval_every": 4, "accumulation": 2, "batch": 2, "distill": 0.5,
    "target_sparsity": 0.6, "probe_every": 1, "warmup": 3,
}  # fmt: skip
# dropout, so that the random state matters
DROPOUT = {"resid_pdrop": 0.2, "attn_pdrop": 0.2, "embd_pdrop": 0.2}

KILLED = """
import os, signal, sys
import torch, test_resume
torch.set_num_threads(1)
made = test_resume.make(sys.argv[1], "all")
made.add_callback(test_resume.Stop(lambda: os.kill(os.getpid(), signal.SIGKILL)))
made.train()
"""


class Stop(TrainerCallback):
    """Ends a run after its fifth step, two after a checkpoint."""

    def __init__(self, end):
        self.end = end

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            self.end()


def make(folder, tune):
    settings = {**SETTINGS, "tune": tune}
    return runs.trainer(Path(folder), of=runs.model(**DROPOUT), data=runs.rows(10), **settings)


def kill(folder):
    tests = Path(__file__).parent
    path = f"{tests}:{tests.parent}:{tests.parent.parent / 'src'}"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr


def interrupt(folder, tune):
    made = make(folder, tune)
    made.add_callback(Stop(lambda: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        made.train()


@pytest.mark.parametrize("tune", ["all", "interaction", "lora"])
def test_stopped_and_resumed(tmp_path, tune):
    if tune == "all":
        kill(tmp_path / "stopped")
    else:
        interrupt(tmp_path / "stopped", tune)
    resumed = make(tmp_path / "stopped", tune)
    resumed.train(resume_from_checkpoint=True)
    whole = make(tmp_path / "whole", tune)
    whole.train()
    assert resumed.state.global_step == whole.state.global_step == 8
    for name in ("loss", "alpha", "gamma", "sparsity_soft", "lr_interaction", "eval_loss_hard"):
        got, want = runs.losses(resumed, name), runs.losses(whole, name)
        assert got == pytest.approx(want, rel=1e-6), name
    # γ had moved, and went on from where it was
    assert len(set(runs.losses(whole, "gamma"))) > 5
    for name, want in runs.weights(whole).items():
        assert_close(runs.weights(resumed)[name], want, atol=1e-6, rtol=0)


def test_other_settings_are_said(tmp_path, caplog):
    runs.trainer(tmp_path, steps=3).train()
    again = runs.trainer(tmp_path, steps=4, gamma=0.5)
    again.train(resume_from_checkpoint=True)
    assert "gamma was 0.3 when the run began and is now 0.5" in caplog.text
    assert again.state.global_step == 4
