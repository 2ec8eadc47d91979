"""A run that is stopped and resumed ends with the same numbers as one that is not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.testing import assert_close
from transformers import TrainerCallback

from training_runs import logged, make_rows, make_trainer, small_model, weights

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
trainer = test_resume.make_run(sys.argv[1], "all")
trainer.add_callback(test_resume.Stop(lambda: os.kill(os.getpid(), signal.SIGKILL)))
trainer.train()
"""


class Stop(TrainerCallback):
    """Stops a run after its fifth step, two after a checkpoint."""

    def __init__(self, end):
        self.end = end

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            self.end()


def make_run(folder, tune):
    settings = {**SETTINGS, "tune": tune}
    return make_trainer(
        Path(folder),
        model=small_model(**DROPOUT),
        data=make_rows(10),
        **settings,
    )


def kill(folder):
    tests = Path(__file__).parent
    path = f"{tests}:{tests.parent}:{tests.parent.parent / 'src'}"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr


def press():
    # as Ctrl-C does; the signal itself does not reach a worker of pytest-xdist
    raise KeyboardInterrupt


def interrupt(folder, tune):
    trainer = make_run(folder, tune)
    trainer.add_callback(Stop(press))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


@pytest.mark.parametrize("tune", ["all", "interaction", "lora"])
def test_stopped_and_resumed(tmp_path, tune):
    if tune == "all":
        kill(tmp_path / "stopped")
    else:
        interrupt(tmp_path / "stopped", tune)
    resumed = make_run(tmp_path / "stopped", tune)
    resumed.train(resume_from_checkpoint=True)
    uninterrupted = make_run(tmp_path / "uninterrupted", tune)
    uninterrupted.train()
    assert resumed.state.global_step == uninterrupted.state.global_step == 8
    for name in ("loss", "alpha", "gamma", "sparsity_soft", "lr_interaction", "eval_loss_hard"):
        got, want = logged(resumed, name), logged(uninterrupted, name)
        assert got == pytest.approx(want, rel=1e-6), name
    # γ had changed, and continued from its last value
    assert len(set(logged(uninterrupted, "gamma"))) > 5
    for name, want in weights(uninterrupted).items():
        assert_close(weights(resumed)[name], want, atol=1e-6, rtol=0)


def test_changed_settings_are_reported(tmp_path, caplog):
    make_trainer(tmp_path, steps=3).train()
    again = make_trainer(tmp_path, steps=4, gamma=0.5)
    again.train(resume_from_checkpoint=True)
    assert "gamma was 0.3 when the run began and is now 0.5" in caplog.text
    assert again.state.global_step == 4
