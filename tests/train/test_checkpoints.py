"""A checkpoint is complete, or it does not exist."""

import shutil

import pytest

from kvprune import PruneError
from kvprune.train import checkpoints, last_whole_checkpoint
from training_runs import make_trainer


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder)
    trainer.train()
    return trainer, folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished[1], tmp_path / "run")


def test_staging_folder_is_removed(finished):
    _, folder = finished
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint-3", "checkpoint-6"]
    for name in (checkpoints.SETTINGS, "kvprune.safetensors", "model.safetensors", "optimizer.pt"):
        assert (folder / "checkpoint-6" / name).is_file()


def test_finds_the_newest(run):
    assert last_whole_checkpoint(run) == run / "checkpoint-6"
    (run / "checkpoint-6").rename(run / "checkpoint-10")
    assert last_whole_checkpoint(run) == run / "checkpoint-10"
    assert last_whole_checkpoint(run / "checkpoint-3") is None


@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "optimizer.pt", "kvprune.safetensors", "rng_state.pth", "files.json"],
)
def test_truncated_file(run, file, caplog):
    path = run / "checkpoint-6" / file
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert last_whole_checkpoint(run) == run / "checkpoint-3"
    assert "checkpoint-6" in caplog.text
    assert file in caplog.text
    with pytest.raises(PruneError, match="not a complete checkpoint"):
        checkpoints.check_complete(run / "checkpoint-6")


def test_missing_file(run):
    (run / "checkpoint-6" / "scheduler.pt").unlink()
    assert checkpoints.find_damage(run / "checkpoint-6") == "scheduler.pt is missing"
    (run / "checkpoint-3" / "files.json").unlink()
    assert last_whole_checkpoint(run) is None
    trainer = make_trainer(run)
    with pytest.raises(PruneError, match="no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(PruneError, match="not a complete checkpoint"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-6"))


def test_killed_while_writing(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, save_every=2)
    publish = checkpoints.publish

    def interrupted(staged, target):
        if target.name == "checkpoint-4":
            raise KeyboardInterrupt
        publish(staged, target)

    monkeypatch.setattr(checkpoints, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (tmp_path / checkpoints.STAGING / "checkpoint-4" / "optimizer.pt").exists()
    assert not (tmp_path / "checkpoint-4").exists()
    monkeypatch.undo()
    again = make_trainer(tmp_path, save_every=2)
    again.train(resume_from_checkpoint=True)
    assert not (tmp_path / checkpoints.STAGING).exists()
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-6"


def test_old_checkpoints_are_deleted_and_a_step_can_be_rewritten(tmp_path):
    trainer = make_trainer(tmp_path, save_every=2, keep_checkpoints=2)
    trainer.train()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    again = make_trainer(tmp_path, save_every=2, keep_checkpoints=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-6"]


def test_best_model_is_reloaded(tmp_path):
    keep_best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    trainer = make_trainer(tmp_path, arguments=keep_best)
    trainer.train()
    assert trainer.state.best_model_checkpoint in (
        str(tmp_path / "checkpoint-3"),
        str(tmp_path / "checkpoint-6"),
    )
    want = trainer.state.best_metric
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want, abs=1e-3)
