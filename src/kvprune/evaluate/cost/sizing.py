"""How many replicas a load needs: from what one replica was measured to do, and bytes by formula.

A replica reads prompts at a rate of `read` tokens/s, and a step that adds a token to each of b rows
takes fixed + per_row · b seconds. Reading holds up the rows that write. So b rows, each followed by
another as soon as it ends, take for b requests

    b · prompt / read + (answer − 1) · (fixed + per_row · b)   seconds;

the first token comes from reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvprune.errors import PruneError
from kvprune.evaluate.cost.formulas import cache_bytes
from kvprune.evaluate.cost.shape import Shape

GAPS = 17 / 16  # extents leave up to a sixteenth of what is held unused


@dataclass(frozen=True)
class Load:
    """What all clients ask for together."""

    requests: float  # per second
    prompt: int  # tokens, mean
    answer: int
    reused: float = 0.0  # share of the prompts' tokens that kept prefixes save from being read

    def __post_init__(self) -> None:
        if self.requests <= 0 or self.prompt < 1 or self.answer < 1:
            raise PruneError(
                f"a load of {self.requests} requests/s of {self.prompt} and {self.answer} tokens "
                f"is none; give positive numbers"
            )
        if not 0 <= self.reused < 1:
            raise PruneError(f"reused={self.reused} must be a share of the prompt, below 1")


@dataclass(frozen=True)
class Replica:
    """What one replica was measured to do, on its hardware, with its model."""

    read: float  # tokens/s of prompts
    fixed: float  # seconds of a step, whatever its rows
    per_row: float  # seconds that each row adds
    memory: float  # bytes that caches may take
    max_rows: int = 64

    @classmethod
    def measured(
        cls, read: float, steps: dict[int, float], memory: float, max_rows: int = 64
    ) -> Replica:
        """From seconds per step at two or more numbers of rows: the line of least squares."""
        if len(steps) < 2 or min(steps) < 1 or min(steps.values()) <= 0 or read <= 0:
            raise PruneError(
                f"reading at {read} tokens/s and steps of {steps} s do not describe a replica; "
                f"measure steps with two numbers of rows, such as 1=0.05,16=0.12"
            )
        rows, seconds = list(steps), list(steps.values())
        mean_rows, mean = math.fsum(rows) / len(rows), math.fsum(seconds) / len(rows)
        spread = math.fsum((b - mean_rows) ** 2 for b in rows)
        slope = math.fsum((b - mean_rows) * (s - mean) for b, s in zip(rows, seconds, strict=True))
        per_row = max(slope / spread, 0.0)
        return cls(read, max(mean - per_row * mean_rows, 0.0), per_row, memory, max_rows)

    def step(self, rows: float) -> float:
        return self.fixed + self.per_row * rows

    def reading(self, load: Load) -> float:
        """Seconds for a prompt, without what kept prefixes save."""
        return load.prompt * (1 - load.reused) / self.read

    def seconds_per_request(self, load: Load, rows: float) -> float:
        """From admission to the last token, if so many rows always run, this one among them."""
        return rows * self.reading(load) + (load.answer - 1) * self.step(rows)

    def seconds_per_token(self, load: Load, rows: float) -> float:
        """Between two tokens of an answer: a step, and what others read meanwhile."""
        if load.answer == 1:
            return 0.0
        return self.step(rows) + (rows - 1) * self.reading(load) / (load.answer - 1)

    def requests_per_second(self, load: Load, rows: float) -> float:
        """What it finishes with so many rows at a time: more rows, more requests, each slower."""
        return rows / self.seconds_per_request(load, rows)


@dataclass(frozen=True)
class Plan:
    """Replicas for a load, and how each is used if requests come at random; means."""

    replicas: int
    row_bytes: int
    rows: int  # that fit into a replica's memory, or its --max-rows
    most_requests: float  # per second and replica, with all rows
    requests: float  # per second and replica, of this load
    running: float  # rows of a replica, at this load
    waits: float  # share of requests that find all rows taken
    used_bytes: float  # of a replica, at this load
    tokens_read: float  # per second and replica
    tokens_written: float
    token_seconds: float  # between two tokens of an answer
    request_seconds: float  # from arrival to the last token


def row_bytes(shape: Shape, load: Load, sparsity: float, rank: int | None = 64) -> int:
    """Bytes of a row at its end, with the slack of its extents; `rank` None: a dense cache."""
    slack = "most" if rank is not None else "none"
    held = cache_bytes(shape, load.prompt + load.answer, sparsity, 1, rank, slack).total
    return math.ceil(held * GAPS)


def plan(load: Load, replica: Replica, bytes_of_row: int, use: float = 0.7) -> Plan:
    """The fewest replicas that are asked for no more than the share `use` of what they can do.

    The rest is for bursts: requests that come at random wait ever longer as it goes to nothing.
    """
    if not 0 < use < 1:
        raise PruneError(f"use={use} must be a share of what a replica can do, below 1")
    rows = min(replica.max_rows, int(replica.memory // bytes_of_row))
    if not rows:
        raise PruneError(
            f"a row of {bytes_of_row:,} bytes does not fit into the {replica.memory:,.0f} of a "
            f"replica; give it more memory, or prune more"
        )
    most = replica.requests_per_second(load, rows)
    replicas = math.ceil(load.requests / (use * most))
    each = load.requests / replicas
    shares = _shares(replica, load, each, rows)
    running = math.fsum(b * share for b, share in enumerate(shares[:rows])) + rows * shares[rows]
    # requests that wait: of a geometric tail, its mean length each time that all rows are taken
    tail = each / most
    waiting = shares[rows] * tail / (1 - tail)
    gaps = [b * replica.seconds_per_token(load, b) for b in range(rows + 1)]
    return Plan(
        replicas=replicas,
        row_bytes=bytes_of_row,
        rows=rows,
        most_requests=most,
        requests=each,
        running=running,
        waits=shares[rows],
        used_bytes=running * bytes_of_row,
        tokens_read=each * load.prompt * (1 - load.reused),
        tokens_written=each * load.answer,
        token_seconds=math.fsum(g * s for g, s in zip(gaps, shares, strict=True)) / running,
        request_seconds=(running + waiting) / each,
    )


def _shares(replica: Replica, load: Load, requests: float, rows: int) -> list[float]:
    """The share of time with 0, 1, ... rows, the last one with all rows, whoever waits besides.

    Requests come at random, and b rows finish at the rate μ(b) = requests_per_second(b):
        share[b] = share[b − 1] · requests / μ(b);   beyond all rows a geometric tail.
    """
    weights = [1.0]
    for b in range(1, rows + 1):
        weights.append(weights[-1] * requests / replica.requests_per_second(load, b))
    weights[rows] /= 1 - requests / replica.requests_per_second(load, rows)
    total = math.fsum(weights)
    return [weight / total for weight in weights]
