"""Hugging Face's Trainer with checkpoints that are whole or not there, and a resume that looks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer_utils import rotate_checkpoints

from kvprune.errors import PruneError
from kvprune.train import checkpoints
from kvprune.utils.files import write_atomically


class WholeTrainer(Trainer):
    """Trainer writes a checkpoint's files one by one in place: a kill leaves half of it there."""

    _aside: Path | None = None  # where the checkpoint at hand is written
    seconds_off = 0.0  # spent on checkpoints since somebody set this to 0

    @property
    def folder(self) -> Path:
        return Path(self.args.output_dir or ".")

    def extras(self) -> dict[str, bytes]:
        """More files for a checkpoint."""
        return {}

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As Trainer's; True resumes from the newest checkpoint that is whole."""
        found: Path | None = None
        if resume_from_checkpoint is True:
            found = checkpoints.last_whole_checkpoint(self.folder)
            if found is None:
                raise PruneError(f"there is no whole checkpoint in {self.folder}; start anew")
        elif resume_from_checkpoint:
            found = checkpoints.check_whole(resume_from_checkpoint)
        return super().train(str(found) if found else None, trial, ignore_keys_for_eval)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's own, but written aside and renamed when all of it is on disk."""
        run = Path(super()._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        started = time.perf_counter()
        aside = run / checkpoints.ASIDE
        if self.args.should_save:
            checkpoints.clear(run)
        self.accelerator.wait_for_everyone()
        self._aside = aside
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._aside = None
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).parent == aside:
            self.state.best_model_checkpoint = str(run / Path(best).name)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            for file, data in self.extras().items():
                write_atomically(aside / name / file, data)
            self.state.save_to_json(str(aside / name / "trainer_state.json"))
            checkpoints.publish(aside / name, run / name)
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()
        self.seconds_off += time.perf_counter() - started

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside or super()._get_output_dir(trial))
