"""A run that a launcher starts in several processes: its log and weights go to a file."""

import json
import sys
from pathlib import Path

import torch

import runs


def main() -> None:
    torch.set_num_threads(1)
    folder, settings, resume = Path(sys.argv[1]), json.loads(sys.argv[2]), len(sys.argv) > 3
    made = runs.trainer(folder, data=runs.rows(24, padded=True), **settings)
    made.train(resume_from_checkpoint=True if resume else None)
    made.save_model(str(folder / "out"))
    if made.is_world_process_zero():
        (folder / "history.json").write_text(json.dumps(made.state.log_history))
    made.end()


if __name__ == "__main__":
    main()
