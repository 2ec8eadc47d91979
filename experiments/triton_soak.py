"""Ten thousand random decode steps of Triton's kernels in its interpreter, beside plain sets.

    TRITON_INTERPRET=1 python -m experiments.triton_soak       writes docs/results/triton_soak.json
    TRITON_INTERPRET=1 python -m experiments.triton_soak --steps 500 --seed 7

Tables of several forms of storage share one arena and take the kernels for those of a GPU: where
rows lie and how many tokens they hold is known to the device, the host has bounds that random reads
lower late. Beside them goes a set of token numbers per row. A token's interaction key says at which
step it leaves, so that who must leave is known exactly. Between steps rows grow, join, leave, are
copied, emptied and read, as a server does. After each operation the rows are compared, every number
of them, and so is the output of attention, with a softmax over the set.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from experiments.publish import DOCS, publish
from kvprune.cache import lengths
from kvprune.cache.arena import Arena
from kvprune.cache.extents import ExtentTable
from kvprune.evaluate.throughput.timing import machine, versions
from kvprune.ops.decode import NewToken, Votes, decode
from kvprune.ops.decode import triton as kernels
from kvprune.ops.form import AttentionForm

HEADS, GROUP, KEY, VALUE, RANK = 1, 2, 16, 8, 2
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16, "kv": "int8", "rotate": False},
    {"dtype": torch.float16, "key_int": "float32"},
)
MOST_ROWS, LONGEST, PERIOD = 4, 40, 512
FORM = AttentionForm(0.002)


def contents() -> dict[str, torch.Tensor]:
    """What a token stores, by its number modulo PERIOD: exact in every form of storage."""
    mixed = torch.Generator().manual_seed(0)
    numbers = {}
    for name, width in (("keys", KEY), ("values", VALUE)):
        numbers[name] = torch.randint(-126, 127, (PERIOD, width), generator=mixed).float()
        # in int8 the scale of each is 1
        numbers[name][:, 0] = 127
    return numbers


CONTENTS = contents()


class Soak:
    """The tables, and a set of tokens for each row of each."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.arena = Arena()
        self.tables = [self.new_table(layout) for layout in range(len(LAYOUTS))]
        self.model: list[list[set[int]]] = [[set()] for _ in LAYOUTS]
        self.next = self.dropped = self.moves_of_rows = 0
        self.signs: dict[int, float] = {}  # each token's first interaction number
        self.done: Counter[str] = Counter()
        self.operations = [
            (60, self.decode), (4, self.join), (4, self.leave), (3, self.copy), (2, self.release),
            (3, self.reserve), (2, self.read),
        ]  # fmt: skip
        # a read arrives, if at all, when it likes; long rows are those of more than one block
        setattr(lengths.Read, "arrived", lambda read: self.random.random() < 0.3)  # noqa: B010
        kernels.MIN_SPAN, kernels.PLAN_BLOCK = 16, 16

    def new_table(self, layout: int) -> ExtentTable:
        table = ExtentTable(
            1, HEADS, KEY, value_dim=VALUE, rank=RANK, extra={"score": ()}, arena=self.arena,
            **LAYOUTS[layout],
        )  # fmt: skip
        table.apart = True
        return table

    def step(self, number: int) -> None:
        """One operation on one table."""
        t = self.random.randrange(len(self.tables))
        weights, choices = zip(*self.operations, strict=True)
        operation = self.random.choices(choices, weights)[0]
        operation(t)
        self.done[operation.__name__] += 1
        if number % 10 == 0:
            self.check(t)

    def decode(self, t: int) -> None:
        """A token more in each row that is active; some leave, by vote or by force."""
        table, rows = self.tables[t], self.model[t]
        before, B = table.offsets(), len(rows)
        token = torch.arange(self.next, self.next + B)
        self.next += B
        # tokens of the residues that the query dislikes get a vote of −1, the others of 1
        residue, share = self.random.randrange(3), self.random.choice([0.0, 0.0, 1.0])
        query_int = torch.tensor([[share, 0.0]]).expand(B, RANK) - 0.0
        key_int = torch.stack([(token % 3 == residue) * -2.0 + 1.0, token * 0.0], 1)
        votes = Votes(query_int, key_int, torch.tensor([0.5]), 0.0, 2, self.random.choice([0, 3]))
        active = torch.tensor([self.random.random() < 0.8 for _ in rows])
        index = token % PERIOD
        key, value = (CONTENTS[name][index][:, None, None] for name in ("keys", "values"))
        dtype = table.layout.dtype
        query = torch.randint(-3, 4, (B, HEADS * GROUP, 1, KEY)).to(dtype)
        new = NewToken(
            query, key.to(dtype), value.to(dtype), token, active, {"score": token[:, None].float()}
        )
        full = max(map(len, rows)) > LONGEST
        if full:
            votes = votes._replace(query_int=query_int * 0, beta=-1.0)
        done = decode(table, new, FORM, votes=votes, backend="triton")
        for b, row in enumerate(rows):
            gone = {x for x in done.dropped[b].tolist() if x >= 0}
            assert gone == (self.losers(row, int(token[b]), votes) if active[b] else set())
            row -= gone
            self.dropped += len(gone)
            seen = sorted(row) if active[b] else []
            self.check_output(done.output[b, :, 0], query[b, :, 0], [*seen, int(token[b])])
            if active[b]:
                row.add(int(token[b]))
                self.signs[int(token[b])] = float(key_int[b, 0])
        moved = zip(before, table.offsets(), strict=True)
        self.moves_of_rows += sum(old != new for old, new in moved)

    def losers(self, row: set[int], now: int, votes: Votes) -> set[int]:
        query, beta = float(votes.query_int[0, 0]), float(votes.beta)
        return {
            x
            for x in row
            if x >= votes.protect_first
            and now - x > votes.protect_recent
            and query * self.signs[x] + beta <= 0
        }

    def check_output(self, got: torch.Tensor, query: torch.Tensor, seen: list[int]) -> None:
        index = torch.tensor(seen) % PERIOD
        keys, values = CONTENTS["keys"][index], CONTENTS["values"][index]
        want = (query.float() @ keys.T * FORM.scaling).softmax(-1) @ values
        # the rounding of what comes out: 8 digits of bfloat16
        torch.testing.assert_close(got.float(), want, rtol=2**-8, atol=2**-8 * 127)

    def join(self, t: int) -> None:
        if len(self.model[t]) < MOST_ROWS:
            self.tables[t].add_rows(1)
            self.model[t].append(set())

    def leave(self, t: int) -> None:
        stay = [b for b in range(len(self.model[t])) if b != self.random.randrange(MOST_ROWS)]
        if stay:
            self.select(t, stay)

    def copy(self, t: int) -> None:
        if len(self.model[t]) < MOST_ROWS:
            self.select(t, [*range(len(self.model[t])), 0])

    def select(self, t: int, rows: list[int]) -> None:
        self.tables[t].select(torch.tensor(rows))
        self.model[t] = [set(self.model[t][b]) for b in rows]

    def release(self, t: int) -> None:
        b = self.random.randrange(len(self.model[t]))
        self.tables[t].release(torch.tensor([b]))
        self.model[t][b] = set()

    def reserve(self, t: int) -> None:
        self.tables[t].reserve(self.random.choice([1, 8]))

    def read(self, t: int) -> None:
        """Somebody asks how many there are, and the host waits."""
        assert self.tables[t].width == max(map(len, self.model[t]))

    def check(self, t: int) -> None:
        """Each row holds its set, and of each token what belongs to it."""
        table = self.tables[t]
        assert table.kept.tolist() == [len(row) for row in self.model[t]]
        for b, tokens in enumerate(self.model[t]):
            row = table.row(b)
            number = row["token"].long()
            assert sorted(number.tolist()) == sorted(tokens)
            for name, want in CONTENTS.items():
                assert row[name][:, 0].float().equal(want[number % PERIOD]), (t, b, name)
            assert row["extra"][:, 0].equal(number.float())
            signs = torch.tensor([self.signs[x] for x in number.tolist()])
            assert row["key_int"][:, 0].float().equal(signs)

    def end(self) -> None:
        for t in range(len(self.tables)):
            self.check(t)
        self.tables.clear()
        assert (self.arena.held, self.arena.used) == (0, 0)

    def row(self, number: int, seconds: float) -> dict[str, object]:
        return {
            "operations": number,
            "seconds": round(seconds, 1),
            "done": dict(sorted(self.done.items())),
            "tokens_inserted": self.next,
            "tokens_dropped": self.dropped,
            "moves_of_rows": self.moves_of_rows,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where docs/results is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    soak, rows, start = Soak(args.seed), [], time.perf_counter()
    for number in track(range(1, args.steps + 1), "steps"):
        soak.step(number)
        if number % max(args.steps // 10, 1) == 0 or number == args.steps:
            rows.append(soak.row(number, time.perf_counter() - start))
            print(rows[-1], flush=True)
    soak.end()
    command = shlex.join(["python", "-m", "experiments.triton_soak", *sys.argv[1:]])
    about = {"machine": machine(), "versions": versions(), "command": command, "seed": args.seed}
    publish("triton_soak", about, rows, args.docs)


if __name__ == "__main__":
    main()
