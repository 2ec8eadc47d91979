"""Several processes that measure one thing: they share the work, and all hold all results.

torchrun and accelerate launch tell each process by environment variables which one it is. Only
small results travel between them, over gloo, also where the models are on GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from kvprune.errors import PruneError

Item = TypeVar("Item")
Result = TypeVar("Result")
# a process that ends closes its connections, which is noticed at once; this is for one that hangs
PATIENCE = timedelta(hours=2)


class Group:
    """The processes of one command, numbered by rank; without a launcher one, which asks nobody.

    `exchange` gives a value to all processes and returns the values of all, by rank. Every method
    must be called by all of them, in the same order.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        exchange: Callable[[Any], list[Any]] = lambda value: [value],
    ):
        self.rank, self.size = rank, size
        self._exchange = exchange

    @property
    def is_main(self) -> bool:
        """The one that prints, and writes files."""
        return self.rank == 0

    def everywhere(self, work: Callable[[], Result]) -> list[Result]:
        """What the work returns in each process; where it fails in one, it fails in all."""
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            failure = error
        said = None if failure is None else str(failure) or type(failure).__name__
        answers = self._exchange((value, said))
        if failure is not None:
            raise failure
        for rank, (_, reason) in enumerate(answers):
            if reason is not None:
                raise PruneError(f"process {rank} of {self.size} failed, so all end: {reason}")
        return [answer for answer, _ in answers]

    def together(self, work: Callable[[], Result]) -> Result:
        """What the work returns here, once it is done in all; it may be too large to send."""
        kept: list[Result] = []
        self.everywhere(lambda: kept.append(work()))
        return kept[0]

    def from_main(self, work: Callable[[], Result | None]) -> Result:
        """What the work returns in the main process, the only one that does it."""
        answer = self.everywhere(lambda: work() if self.is_main else None)[0]
        return answer  # type: ignore[return-value]

    def map(self, items: Sequence[Item], work: Callable[[Item], Result]) -> Iterator[Result]:
        """work(item) of each item, in order; a process does every size-th and gets the others.

        In rounds of one item each, so that results can be stored on the way, and a failure ends
        all processes within the time of an item.
        """
        for start in range(0, len(items), self.size):
            turn = items[start : start + self.size]

            def mine(turn: Sequence[Item] = turn) -> Result | None:
                return work(turn[self.rank]) if self.rank < len(turn) else None

            yield from self.everywhere(mine)[: len(turn)]  # type: ignore[misc]

    def agree(self, about: Callable[[], dict[str, Any]]) -> None:
        """Refuse to mix: other weights, another text or another version on one of the machines."""
        if self.size == 1:
            return
        answers = self.everywhere(about)
        for rank, other in enumerate(answers):
            for name, value in answers[self.rank].items():
                if other.get(name) != value:
                    raise PruneError(
                        f"process {rank} of {self.size} has {name} = {other.get(name)!r}, process "
                        f"{self.rank} has {value!r}; give all machines the same files and settings"
                    )


ALONE = Group()


def is_main() -> bool:
    """Whether this is the process that prints, before or without a group."""
    return os.environ.get("RANK", "0") == "0"


def refuse_many(what: str) -> None:
    """An error where a launcher has started several processes: each would do all of it."""
    if _size() > 1:
        raise PruneError(f"{what} is for one process, not {_size()}; start it without a launcher")


def _size() -> int:
    """How many processes a launcher says that there are; some clusters set half of what it does."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@contextmanager
def launched() -> Iterator[Group]:
    """The group in which a launcher started this process, or `ALONE`."""
    size = _size()
    if size == 1:
        yield ALONE
        return
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    # transformers would leave the weights of all but one process empty, for FSDP to fill
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    _choose_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    initialised = dist.is_initialized()
    try:
        if not initialised:
            dist.init_process_group("gloo", timeout=PATIENCE)
        members = dist.new_group(backend="gloo", timeout=PATIENCE) if initialised else None
    except (ValueError, RuntimeError) as error:
        raise PruneError(
            f"process {rank} of {size} does not reach the others ({_reason(error)}); start all of "
            f"them with torchrun or accelerate launch, and open the main machine's port"
        ) from error

    def exchange(value: Any) -> list[Any]:
        answers: list[Any] = [None] * size
        try:
            dist.all_gather_object(answers, value, group=members)
        except RuntimeError as error:
            raise PruneError(
                f"process {rank} of {size} has lost the others ({_reason(error)}); the one that "
                f"ended first has said why"
            ) from error
        return answers

    try:
        yield Group(rank, size, exchange)
    finally:
        if not initialised:
            dist.destroy_process_group()


def _choose_gpu(local_rank: int) -> None:
    """A GPU for each process of this machine: what is put on `cuda` from now on goes there."""
    import torch

    if not torch.cuda.is_available():
        return
    if local_rank >= torch.cuda.device_count():
        raise PruneError(
            f"process {local_rank} of this machine has no GPU: there are "
            f"{torch.cuda.device_count()}; start as many processes as GPUs"
        )
    torch.cuda.set_device(local_rank)


def _reason(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
