"""A run that a launcher starts in several processes: its log and weights go to a file."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

import training_runs as runs


def allow_fsdp_on_the_cpu() -> None:
    """accelerate shards only where it believes in GPUs, and would quietly use DDP here."""
    plain = PartialState.__init__

    def believe(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = believe


def main() -> None:
    torch.set_num_threads(1)
    folder, settings, resume = Path(sys.argv[1]), json.loads(sys.argv[2]), len(sys.argv) > 3
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        allow_fsdp_on_the_cpu()
    made = runs.trainer(folder, data=runs.rows(24, padded=True), **settings)
    made.train(resume_from_checkpoint=True if resume else None)
    made.save_model(str(folder / "out"))
    if made.is_world_process_zero():
        kind = str(made.accelerator.distributed_type)
        (folder / "history.json").write_text(json.dumps([made.state.log_history, kind]))
    made.end()


if __name__ == "__main__":
    main()
