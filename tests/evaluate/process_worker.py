"""One process of several that run commands in turn: what each prints, by rank, as JSON."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from kvprune.cli import app
from kvprune.errors import PruneError
from kvprune.evaluate.perplexity import measure
from kvprune.utils.processes import launched


def run(args: list[str]) -> str:
    """What a command prints on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        app(args, standalone_mode=False)
    return said.getvalue()


def fail_in_the_second(args: list[str]) -> str:
    """The error with which the command ends here if process 1 cannot read its second batch."""
    sums, calls = measure._sums, []

    def broken(*batch):
        calls.append(batch)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise PruneError("no memory left; lower --batch")
        return sums(*batch)

    measure._sums = broken
    try:
        run(args)
    except PruneError as error:
        return str(error)
    finally:
        measure._sums = sums
    return "no error"


def disagree() -> str:
    with launched() as group:
        try:
            group.agree(lambda: {"weights": "new" if group.rank == 1 else "old"})
        except PruneError as error:
            return str(error)
    return "no error"


def main() -> None:
    folder, commands = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    said = {name: run(args) for name, args in commands.items()}
    if "perplexity" in commands:
        said["failed"] = fail_in_the_second(commands["perplexity"])
        said["disagreed"] = disagree()
        # after the failure, all are together again
        said["again"] = run(commands["perplexity"])
    file = folder / f"rank{os.environ['RANK']}.json"
    file.write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
