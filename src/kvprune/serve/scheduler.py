"""Which rows read how many tokens in the next step: plain Python, without torch.

A row is behind by `left` tokens: its prompt, or the token that was sampled last. Reading a prompt,
going on with a part of one, decoding and reading again after a preemption are all the same: a row
catches up. Rows that decode go first, so that a long prompt delays them by one chunk at most; the
rest of the step's tokens go to prompts, the oldest first. Large steps are faster, so they are taken
while nobody is delayed by them. When bytes run short the latest row gives
way, never the oldest: so somebody always gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

Admission = Literal["forecast", "worst", "optimistic"]

# share of the budget that is planned with: the rest is for gaps between rows
USABLE = 0.9
# while nobody waits for a next token, a step may read so many times more
ALONE = 2
# how much of what is seen lately counts in the forecast
RECENT = 0.1


class Row:
    """The tokens of one choice: its prompt and answer so far. The cache has read `done` of them."""

    def __init__(
        self,
        tokens: list[int],
        max_tokens: int,
        stops_at: tuple[int, ...] = (),
        at_once: bool = False,
    ):
        self.tokens, self.prompt, self.max_tokens = tokens, len(tokens), max_tokens
        self.done = 0
        self.stops_at = stops_at  # lengths at which a read ends, for a snapshot
        self.at_once = at_once  # whether the prompt must be read in one step
        self.model = ""  # rows of one model keep about as much of what they read
        self.arrival = 0
        self.preemptions = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done

    def next_tokens(self, most: int) -> int:
        """How many tokens it reads next, of at most so many."""
        if self.at_once and self.left > 1:
            return self.left
        stop = min((stop for stop in self.stops_at if stop > self.done), default=len(self.tokens))
        return min(self.left, most, stop - self.done)


class Sizes(Protocol):
    """What the scheduler must know about memory."""

    def held(self, row: Row) -> int:
        """Bytes that a row takes now; of one that waits, those it takes when it comes back."""

    def need(self, row: Row, tokens: int) -> int:
        """Bytes that so many more tokens take at most."""

    def copies(self) -> int:
        """Bytes that a row which moves takes twice for a moment, at most."""

    def slot(self, row: Row) -> int:
        """Bytes of one token of the row that every layer keeps."""


@dataclass
class Plan:
    """A step: first rows leave, then rows come, then all of `work` is one forward pass."""

    preempt: list[Row] = field(default_factory=list)
    admit: list[Row] = field(default_factory=list)
    work: dict[Row, int] = field(default_factory=dict)
    too_large: list[Row] = field(default_factory=list)  # even alone they do not fit


class Forecast:
    """How many bytes a row will take in the end, from what earlier rows took."""

    def __init__(self, kept: float = 1.0, answer: float = 256.0):
        self.kept = kept  # share of its tokens that a row holds
        self.answer = answer  # new tokens of a row
        self.error = 0.0  # of the latest row that ended: bytes forecast / bytes held

    def bytes(self, row: Row, slot: int, mode: Admission) -> float:
        if mode == "worst":
            return float((row.prompt + row.max_tokens) * slot)
        new = min(row.max_tokens, max(2 * self.answer, len(row.tokens) - row.prompt))
        return (row.prompt + new) * slot * min(self.kept, 1.0)

    def learn(self, row: Row, held: int, slot: int) -> None:
        """A row has ended."""
        if not row.done:
            return
        new = len(row.tokens) - row.prompt
        self.error = self.kept * row.done * slot / max(held, 1)
        self.kept += RECENT * (held / (row.done * slot) - self.kept)
        self.answer += RECENT * (new - self.answer)

    def was_short(self) -> None:
        """A row had to give way: expect more of the next ones."""
        self.kept = min(1.25 * self.kept, 1.0)


class Scheduler:
    """Rows that wait and rows that run; `plan` says what happens next, and nothing has happened."""

    def __init__(
        self,
        sizes: Sizes,
        budget: int,
        max_rows: int = 64,
        chunk: int = 1024,
        admission: Admission = "forecast",
    ):
        self.sizes, self.usable = sizes, int(USABLE * budget)
        self.max_rows, self.chunk = max_rows, max(chunk, max_rows)
        self.admission: Admission = admission
        self.forecasts: dict[str, Forecast] = {}
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []  # the oldest first
        self._arrivals = 0

    def add(self, row: Row) -> None:
        self._arrivals += 1
        row.arrival = self._arrivals
        self.waiting.append(row)

    def remove(self, row: Row) -> None:
        """A row has ended, or is not wanted any more."""
        if row in self.running:
            self.forecast(row).learn(row, self.sizes.held(row), self.sizes.slot(row))
            self.running.remove(row)
        else:
            self.waiting.remove(row)

    def forecast(self, row: Row) -> Forecast:
        """What is known of rows like this one."""
        return self.forecasts.setdefault(row.model, Forecast())

    def was_short(self, rows: Iterable[Row]) -> None:
        """These had to give way."""
        for forecast in {self.forecast(row) for row in rows}:
            forecast.was_short()

    def plan(self) -> Plan:
        plan = Plan()
        held = {row: self.sizes.held(row) for row in self.running}
        free = self.usable - sum(held.values()) - self.sizes.copies()
        decoding = any(row.left == 1 and row.done for row in self.running)
        tokens = self.chunk if decoding else ALONE * self.chunk
        # a stable order: those that decode, then prompts; the oldest first in each
        for row in sorted(self.running, key=lambda row: row.left > 1):
            if row in plan.preempt:
                continue
            count = row.next_tokens(tokens)
            if not count:
                continue
            need = self.sizes.need(row, count)
            while need > free and (victim := self._latest(plan, row)) is not None:
                free += held[victim] + self._take_back(plan, victim)
                plan.preempt.append(victim)
            if need > free:
                # nobody came after it: it gives way itself, unless it is the oldest
                if row is self.running[0]:
                    plan.too_large.append(row)
                else:
                    plan.preempt.append(row)
                    free += held[row]
                continue
            plan.work[row] = count
            free, tokens = free - need, tokens - min(count, tokens)
        if plan.preempt:
            self.was_short(plan.preempt)
        elif not plan.too_large:
            self._admit(plan, free, tokens)
        return plan

    def apply(self, plan: Plan) -> None:
        """The rows have left and come as planned."""
        for row in plan.preempt:
            row.preemptions += 1
            self.running.remove(row)
        # they go on before anybody who came later
        for row in sorted(plan.preempt, key=lambda row: -row.arrival):
            self.waiting.appendleft(row)
        for row in plan.admit:
            self.waiting.remove(row)
            self.running.append(row)
        self.running.sort(key=lambda row: row.arrival)

    def _admit(self, plan: Plan, free: int, tokens: int) -> None:
        """Let rows in while tokens, rows and bytes last, in the order of their arrival."""
        expected = 0.0
        if self.admission != "optimistic":
            for row in self.running:
                expected += max(self._later(row), self.sizes.held(row))
        for row in self.waiting:
            count = row.next_tokens(tokens)
            if not count or not tokens or len(self.running) + len(plan.admit) >= self.max_rows:
                return
            need = self.sizes.held(row) + self.sizes.need(row, count)
            later = max(self._later(row), float(need))
            alone = not self.running and not plan.admit
            if need > free or (expected + later > self.usable and not alone):
                if alone:
                    plan.too_large.append(row)
                return
            if self.admission != "optimistic":
                expected += later
            plan.admit.append(row)
            plan.work[row] = count
            free, tokens = free - need, tokens - min(count, tokens)

    def _later(self, row: Row) -> float:
        """Bytes that a row is expected to take in the end."""
        return self.forecast(row).bytes(row, self.sizes.slot(row), self.admission)

    def _latest(self, plan: Plan, row: Row) -> Row | None:
        """The latest row that came after this one and still runs."""
        for other in reversed(self.running):
            if other not in plan.preempt and other.arrival > row.arrival:
                return other
        return None

    def _take_back(self, plan: Plan, row: Row) -> int:
        """Bytes that a row was to get in this step, and does not get now."""
        count = plan.work.pop(row, 0)
        return self.sizes.need(row, count) if count else 0
