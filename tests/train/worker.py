"""One process of a distributed run: writes the log and the weights to files."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from training_runs import make_rows, make_trainer


def allow_fsdp_on_the_cpu() -> None:
    """accelerate shards only if it finds GPUs, and would silently use DDP here."""
    original = PartialState.__init__

    def pretend(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = pretend


def main() -> None:
    torch.set_num_threads(1)
    folder, settings, resume = Path(sys.argv[1]), json.loads(sys.argv[2]), len(sys.argv) > 3
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        allow_fsdp_on_the_cpu()
    trainer = make_trainer(folder, data=make_rows(24, padded=True), **settings)
    trainer.train(resume_from_checkpoint=True if resume else None)
    trainer.save_model(str(folder / "out"))
    if trainer.is_world_process_zero():
        kind = str(trainer.accelerator.distributed_type)
        (folder / "history.json").write_text(json.dumps([trainer.state.log_history, kind]))
    trainer.end()


if __name__ == "__main__":
    main()
