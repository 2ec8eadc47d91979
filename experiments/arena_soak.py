"""A million random operations on an arena: is a byte ever lost, owned twice or wrong?

    python -m experiments.arena_soak                    writes docs/results/arena_soak.json
    python -m experiments.arena_soak --operations 20000 --seed 7

Tables of several layouts share one arena with a budget. Rows get tokens, lose them, grow, shrink,
join, leave, are copied, kept as snapshots and restored; tables die and are replaced. Beside them
goes a model too simple to be wrong: a set of token numbers per row, from which every stored number
follows. After each operation its rows are compared and the budget is checked, every hundred
operations each byte of the arena is counted, and every thousand everything is compared.
"""

from __future__ import annotations

import argparse
import copy
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from experiments.publish import DOCS, publish
from kvprune.cache.arena import Arena
from kvprune.cache.chunk import ALIGN, Chunk
from kvprune.cache.extents import ExtentTable
from kvprune.errors import BudgetError
from kvprune.evaluate.throughput.timing import machine, versions

HEADS, KEY, VALUE, RANK = 2, 8, 4, 4
EXTRA = {"score": ()}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "kv": "int8", "rotate": False},
    {"dtype": torch.float32, "key_int": "int8"},
)
MOST_ROWS, MOST_SNAPSHOTS, LONGEST = 6, 12, 400
BUDGET = 100_000
# what a budget may refuse
ASKS = {"insert", "read", "grow", "restore", "copy", "duplicate"}
# by turns the arena fills up to its budget, and empties
PHASE = 2000
# contents repeat after so many tokens; the numbers of the tokens do not
PERIOD = 4096


def contents() -> dict[str, Tensor]:
    """What a token stores, by its number modulo PERIOD: whole numbers, exact in every dtype.

    The first of each group is 127, so that in int8 its scale is 1.
    """
    mixed = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        numbers = torch.randint(-126, 127, (PERIOD, *shape), generator=mixed).float()
        numbers[..., 0] = 127
        return numbers

    return {"keys": draw(HEADS, KEY), "values": draw(HEADS, VALUE), "key_int": draw(RANK)}


CONTENTS = contents()


# False: it cannot be done to this table now
Operation = Callable[[int], bool | None]


class Watched(Arena):
    """An arena that remembers the most that it ever held."""

    peak = 0

    def _add(self, size: int) -> Chunk:
        chunk = super()._add(size)
        self.peak = max(self.peak, self.held)
        return chunk

    def _usual(self) -> int:
        # the rows are few: most would have a chunk of their own, and nothing would be moved
        return 6144


class Kept:
    """A row outside of any table, as a snapshot keeps it."""

    def __init__(self, layout: int, columns: dict[str, Tensor], tokens: set[int]):
        self.layout, self.columns, self.tokens = layout, columns, tokens


class Soak:
    """The arena, its tables, and the model: a set of tokens for each row of each table."""

    def __init__(self, seed: int = 0, budget: int = BUDGET):
        self.random = random.Random(seed)
        self.arena = Watched(budget=budget)
        self.tables = [self.new_table(layout) for layout in range(len(LAYOUTS))]
        self.model: list[list[set[int]]] = [[set()] for _ in LAYOUTS]
        self.snapshots: list[Kept] = []
        self.next, self.fills = 0, True
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        # how often, and how
        self.operations: list[tuple[int, Operation]] = [
            (40, self.insert), (6, self.read), (25, self.drop), (2, self.drop_all), (4, self.grow),
            (4, self.shrink), (4, self.snapshot), (5, self.restore), (5, self.leave),
            (3, self.copy), (2, self.release), (2, self.reorder), (1, self.settle), (1, self.trim),
        ]  # fmt: skip
        self.rare: list[Operation] = [self.duplicate, self.replace]

    def new_table(self, layout: int) -> ExtentTable:
        return ExtentTable(
            1, HEADS, KEY, value_dim=VALUE, rank=RANK, extra=EXTRA, arena=self.arena,
            **LAYOUTS[layout],
        )  # fmt: skip

    def step(self, number: int) -> None:
        """One operation, and the checks that are due."""
        self.fills = number // PHASE % 2 == 0
        while not self.one(self.random.randrange(len(self.tables))):
            pass
        assert self.arena.budget is not None
        assert self.arena.peak <= self.arena.budget
        if number % 100 == 0:
            self.check_bytes()
        if number % 1000 == 0:
            self.check()

    def one(self, t: int) -> bool:
        """Try an operation on a table; False if this one cannot be done there."""
        weights, choices = zip(*self.operations, strict=True)
        operation = self.random.choices(choices, weights)[0]
        if self.random.random() < 0.002:
            operation = self.random.choice(self.rare)
        name = operation.__name__
        try:
            if operation(t) is False:
                return False
            self.done[name] += 1
        except BudgetError as error:
            self.check_refusal(name, t, error)
        return True

    def check_refusal(self, name: str, t: int, error: BudgetError) -> None:
        """Only what asks for room is refused, for a reason, and nothing has changed."""
        assert name in ASKS, f"{name} asks for nothing, but was refused: {error}"
        assert error.allowed == self.arena.budget
        assert error.asked + error.held > error.allowed, error
        self.refused[name] += 1
        self.check_table(t)

    def rows(self, t: int) -> list[int]:
        """One row or two."""
        count = len(self.model[t])
        return self.random.sample(range(count), min(count, self.random.choice([1, 1, 2])))

    def push(self, t: int, rows: list[int], T: int) -> None:
        B = len(self.model[t])
        token = torch.arange(self.next, self.next + B * T, dtype=torch.int64).view(B, T)
        index = token % PERIOD
        valid = torch.zeros(B, T, dtype=torch.bool)
        valid[rows] = True
        if T > 2 and self.random.random() < 0.3:
            valid[:, :: self.random.randrange(2, 5)] = False
        dtype = self.tables[t].layout.dtype
        key, value = (
            CONTENTS[name][index].transpose(1, 2).to(dtype) for name in ("keys", "values")
        )
        self.tables[t].push(
            key, value, CONTENTS["key_int"][index], token, valid, score=token.float()
        )
        self.next += B * T
        for b in rows:
            self.model[t][b].update(token[b][valid[b]].tolist())
            self.check_row(t, b)

    def insert(self, t: int) -> None:
        self.push(t, self.rows(t), 1)

    def read(self, t: int) -> None:
        self.push(t, self.rows(t), self.random.choice([3, 17, 60]))

    def remove(self, t: int, rows: list[int], share: float) -> None:
        table = self.tables[t]
        mask = torch.zeros(table.rows, table.width, dtype=torch.bool)
        for b in rows:
            token = table.row(b)["token"].tolist()
            gone = [self.random.random() < share for _ in token]
            mask[b, : len(token)] = torch.tensor(gone, dtype=torch.bool)
            self.model[t][b] -= {number for number, out in zip(token, gone, strict=True) if out}
        table.remove(mask)
        for b in rows:
            self.check_row(t, b)

    def drop(self, t: int) -> None:
        rows = self.rows(t)
        if any(len(self.model[t][b]) > LONGEST for b in rows):
            self.remove(t, rows, 0.8)
        else:
            self.remove(t, rows, self.random.choice([0.0, 0.02, 0.1] if self.fills else [0.1, 0.6]))

    def drop_all(self, t: int) -> None:
        share = self.random.choice([0.01, 0.2] if self.fills else [0.5, 1.0])
        self.remove(t, list(range(len(self.model[t]))), share)

    def grow(self, t: int) -> None:
        room = self.random.choice([1, 8, 50])
        self.tables[t].reserve(room)
        kept, capacity = self.tables[t].kept, self.tables[t].capacity
        assert (capacity >= kept + room).all()

    def shrink(self, t: int) -> None:
        table = self.tables[t]
        full = self.is_full()
        table.finish()
        assert full or (table.kept + table.kept // 16 + 4 >= 0.85 * table.capacity).all()

    def snapshot(self, t: int) -> None:
        b = self.random.randrange(len(self.model[t]))
        columns = {name: column.clone() for name, column in self.tables[t].row(b).items()}
        if len(self.snapshots) == MOST_SNAPSHOTS:
            self.snapshots.pop(self.random.randrange(MOST_SNAPSHOTS))
        self.snapshots.append(Kept(t, columns, set(self.model[t][b])))

    def restore(self, t: int) -> bool:
        """A snapshot joins the table that it fits, however long ago it was taken."""
        fits = [kept for kept in self.snapshots if kept.layout == t]
        table, count = self.tables[t], len(self.model[t])
        if not fits or count == MOST_ROWS:
            return False
        kept, before = self.random.choice(fits), table.offsets()
        full = self.is_full()
        table.add_rows(1)
        try:
            table.put(count, kept.columns)
        except BudgetError:
            table.select(torch.arange(count))
            raise
        # in a full arena others move together, to make room
        assert full or table.offsets()[:-1] == before
        self.model[t].append(set(kept.tokens))
        self.check_row(t, count)
        return True

    def is_full(self) -> bool:
        """Whether a row may find no room."""
        largest = max((extent.size for extent in self.arena), default=0)
        return self.arena.held + 2 * largest > (self.arena.budget or 0)

    def leave(self, t: int) -> bool:
        count = len(self.model[t])
        if count == 1:
            return False
        gone = self.random.randrange(count)
        stay = [b for b in range(count) if b != gone]
        before = self.tables[t].offsets()
        self.tables[t].select(torch.tensor(stay))
        assert self.tables[t].offsets() == [before[b] for b in stay]
        del self.model[t][gone]
        return True

    def select(self, t: int, rows: list[int]) -> None:
        self.tables[t].select(torch.tensor(rows))
        self.model[t] = [set(self.model[t][b]) for b in rows]
        self.check_table(t)

    def copy(self, t: int) -> bool:
        """A row twice, side by side, as beams do."""
        count = len(self.model[t])
        if count == MOST_ROWS:
            return False
        self.select(t, sorted([*range(count), self.random.randrange(count)]))
        return True

    def reorder(self, t: int) -> None:
        rows = list(range(len(self.model[t])))
        self.random.shuffle(rows)
        self.select(t, rows)

    def release(self, t: int) -> None:
        b = self.random.randrange(len(self.model[t]))
        self.tables[t].release(torch.tensor([b]))
        self.model[t][b] = set()

    def settle(self, t: int) -> None:
        self.arena.settle()

    def trim(self, t: int) -> None:
        self.arena.trim()

    def duplicate(self, t: int) -> None:
        """A copy of a whole table takes its place."""
        self.tables[t] = copy.deepcopy(self.tables[t])

    def replace(self, t: int) -> None:
        """A table dies, as a cache does that nobody needs any more."""
        self.tables[t] = self.new_table(t)
        self.model[t] = [set()]

    def check_row(self, t: int, b: int) -> None:
        """A row holds the tokens of the model, each once, and of each what belongs to it."""
        row = self.tables[t].row(b)
        token = row["token"]
        numbers = token.tolist()
        assert len(numbers) == len(self.model[t][b])
        assert set(numbers) == self.model[t][b]
        index = token.long() % PERIOD
        for name, want in CONTENTS.items():
            assert row[name].equal(want[index].to(row[name].dtype)), (t, b, name)
        assert row["extra"][:, 0].equal(token.float())
        for name in row.keys() - {*CONTENTS, "extra", "token"}:
            assert bool((row[name] == 1).all()), (t, b, name)

    def check_table(self, t: int) -> None:
        assert self.tables[t].kept.tolist() == [len(row) for row in self.model[t]]
        for b in range(len(self.model[t])):
            self.check_row(t, b)

    def check_bytes(self) -> None:
        """Every byte is in one extent or one gap, and every extent in one row."""
        arena = self.arena
        owned = [extent for table in self.tables for extent in table._extents if extent is not None]
        assert len({id(extent) for extent in owned}) == len(owned)
        assert {id(extent) for extent in owned} == {id(extent) for extent in arena}
        assert arena.used == sum(extent.size for extent in owned)
        assert arena.held == sum(chunk.size for chunk in arena.chunks)
        owners = {id(chunk): np.zeros(chunk.size // ALIGN, np.int64) for chunk in arena.chunks}
        for chunk in arena.chunks:
            for offset, size in chunk.gaps:
                owners[id(chunk)][offset // ALIGN : (offset + size) // ALIGN] += 1
        for extent in owned:
            first = extent.offset // ALIGN
            owners[id(extent.chunk)][first : first + extent.size // ALIGN] += 1
        assert all((count == 1).all() for count in owners.values())

    def check(self) -> None:
        """Everything."""
        self.check_bytes()
        for t in range(len(self.tables)):
            self.check_table(t)

    def end(self) -> None:
        """All rows go; then nothing is left."""
        self.check()
        self.tables.clear()
        assert (self.arena.held, self.arena.used, self.arena.chunks) == (0, 0, [])

    def row(self, number: int, seconds: float) -> dict[str, object]:
        """What has happened so far."""
        return {
            "operations": number,
            "seconds": round(seconds, 1),
            "done": dict(sorted(self.done.items())),
            "refused": dict(sorted(self.refused.items())),
            "tokens_inserted": self.next,
            "tokens_held": sum(len(row) for rows in self.model for row in rows),
            "held_bytes": self.arena.held,
            "peak_bytes": self.arena.peak,
            "budget_bytes": self.arena.budget,
        }


def run(soak: Soak, operations: int, every: int) -> Iterator[dict[str, object]]:
    """Do them; a row of the log after each `every`, and at the end."""
    start = time.perf_counter()
    for number in track(range(1, operations + 1), "operations"):
        soak.step(number)
        if number % every == 0 or number == operations:
            yield soak.row(number, time.perf_counter() - start)
    soak.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where docs/results is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for row in run(Soak(args.seed), args.operations, max(args.operations // 20, 1)):
        rows.append(row)
        print({name: row[name] for name in ("operations", "seconds", "tokens_held", "peak_bytes")})
        sys.stdout.flush()
    command = shlex.join(["python", "-m", "experiments.arena_soak", *sys.argv[1:]])
    about = {"machine": machine(), "versions": versions(), "command": command, "seed": args.seed}
    publish("arena_soak", about, rows, args.docs)


if __name__ == "__main__":
    main()
