"""What a pruning run writes and reads: adapters, whole models, checkpoints, the model card."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from kvprune.adapters import lora
from kvprune.adapters.load import fill
from kvprune.adapters.save import describe_base, save
from kvprune.adapters.saved_file import FILE
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned
from kvprune.train.card import model_card
from kvprune.train.config import TrainConfig
from kvprune.train.control import Control
from kvprune.train.whole import WholeTrainer
from kvprune.utils.files import write_atomically

log = logging.getLogger(__name__)

SETTINGS = "kvprune_train.json"  # in every checkpoint: the settings, and where the controller is
INTERACTION = ".interaction."  # in the name of every interaction weight


class SavingTrainer(WholeTrainer):
    """See kvprune.adapters.saved_file for what lies in which folder."""

    config: TrainConfig
    pruned: Pruned
    control_state: Control

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's own, and where it would write nothing, as FSDP keeps its shards, the whole."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        sharded = plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type)
        if sharded and not _internal_call:
            state = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir, state)
        super().save_model(output_dir, _internal_call)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        folder = Path(output_dir) if output_dir else self.folder
        if self.config.tune == "all":
            state = self.pruned.model.state_dict() if state_dict is None else state_dict
            super()._save(str(folder), {n: t for n, t in state.items() if INTERACTION not in n})
        elif self.processing_class is not None:
            self.processing_class.save_pretrained(str(folder))
        # last, so that a folder with this file is complete
        save(self.pruned, folder, state_dict)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write README.md into the run's folder, as push_to_hub does.

        Of Trainer's own arguments: language, license, model_name, finetuned_from, and dataset, the
        names of the data. `settings` is whatever else the card should record.
        """
        if not self.is_world_process_zero():
            return
        data = kwargs.get("dataset") or []
        card = model_card(
            self.config,
            name=self.args.hub_model_id or kwargs.get("model_name") or self.folder.name,
            base=kwargs.get("finetuned_from") or describe_base(self.pruned.model)["name"],
            data=[data] if isinstance(data, str) else data,
            measured=self.last_evaluation(),
            settings=kwargs.get("settings"),
            steps=self.state.global_step,
            language=kwargs.get("language"),
            license=kwargs.get("license"),
        )
        write_atomically(self.folder / "README.md", card.encode())

    def last_evaluation(self, at_least: int = 0) -> dict[str, float] | None:
        """What the newest evaluation found, unless it is from before step `at_least`."""
        for entry in reversed(self.state.log_history):
            if "eval_loss" in entry and entry["step"] >= at_least:
                return entry
        return None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Trainer copies the files that it knows of into the folder that it pushes; and ours."""
        if self.is_world_process_zero():
            for name in (FILE, lora.CONFIG, lora.WEIGHTS):
                if (Path(checkpoint_folder) / name).is_file():
                    shutil.copy(Path(checkpoint_folder) / name, self.folder / name)
        super()._push_from_checkpoint(checkpoint_folder)

    def extras(self) -> dict[str, bytes]:
        settings = {"config": self.config.to_dict(), "control": asdict(self.control_state)}
        return {SETTINGS: json.dumps(settings, indent=1).encode()}

    def _load_from_checkpoint(self, checkpoint: str, model: nn.Module | None = None) -> None:
        settings = json.loads((Path(checkpoint) / SETTINGS).read_text())
        self.control_state = Control(**settings["control"])
        ours = self.config.to_dict()
        for name, value in settings["config"].items():
            if ours.get(name) != value:
                log.warning("%s was %s when the run began and is now %s", name, value, ours[name])
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(checkpoint, model)
            return
        if self.config.tune == "all":
            super()._load_from_checkpoint(checkpoint, model)
        fill(self.pruned, checkpoint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """The interaction weights lie in a file of their own, tied weights under another name."""
        tied = set(self.pruned.model.all_tied_weights_keys)
        missing = [k for k in load_result.missing_keys if INTERACTION not in k and k not in tied]
        if missing or load_result.unexpected_keys:
            raise PruneError(
                f"the checkpoint is of another model: missing {missing}, "
                f"unexpected {load_result.unexpected_keys}"
            )
