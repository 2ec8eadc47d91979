"""The scheduler, with rows whose memory is made up: never over budget, everybody gets on."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvprune.serve.scheduler import ALONE, USABLE, Row, Scheduler

SLOT = 10


class Memory:
    """A runner that keeps a share of each row's tokens."""

    def __init__(self):
        self.kept = {}  # bytes of rows that run
        self.parked = {}

    def held(self, row):
        return self.kept.get(row, self.parked.get(row, 0))

    def need(self, row, tokens):
        return tokens * SLOT

    def copies(self):
        return 0

    def slot(self, row):
        return SLOT

    def read(self, row, tokens, share):
        self.kept[row] += round(share * tokens) * SLOT
        row.done += tokens


@st.composite
def loads(draw):
    rows = draw(st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 60), st.integers(1, 30), st.floats(0, 1)),
        min_size=1, max_size=12,
    ))  # fmt: skip
    longest = max(prompt + new for _, prompt, new, _ in rows)
    chunk = draw(st.integers(1, 40))
    return {
        "rows": rows,
        "budget": draw(st.integers(int((longest + 2) * SLOT / USABLE) + SLOT, 3000)),
        "chunk": chunk,
        "max_rows": draw(st.integers(1, 8)),
        "admission": draw(st.sampled_from(["forecast", "worst", "optimistic"])),
        "keeps": draw(st.booleans()),  # whether preempted rows are read again
        "cancels": draw(st.sets(st.tuples(st.integers(0, 80), st.integers(0, 11)))),
        "stops": draw(st.sets(st.integers(1, 50), max_size=2)),
    }


@settings(max_examples=200, deadline=None)
@given(loads())
def test_any_load(load):
    memory = Memory()
    scheduler = Scheduler(
        memory, load["budget"], load["max_rows"], load["chunk"], load["admission"]
    )
    coming = sorted(enumerate(load["rows"]), key=lambda pair: pair[1][0])
    rows, shares, ended = {}, {}, set()
    for step in range(5000):
        while coming and coming[0][1][0] <= step:
            number, (_, prompt, new, share) = coming.pop(0)
            row = rows[number] = Row([0] * prompt, new, tuple(load["stops"]))
            shares[row] = share
            scheduler.add(row)
        for when, number in load["cancels"]:
            row = rows.get(number)
            if when == step and row is not None and row not in ended:
                end(scheduler, memory, row, ended)
        if not coming and len(ended) == len(rows):
            break
        oldest = scheduler.running[0] if scheduler.running else None
        before = (list(scheduler.running), list(scheduler.waiting))
        plan = scheduler.plan()
        assert before == (scheduler.running, list(scheduler.waiting))  # nothing has happened
        # what fits alone is never given up, and the oldest never gives way
        assert not plan.too_large
        assert oldest not in plan.preempt
        assert not (plan.preempt and plan.admit)
        assert not set(plan.preempt) & set(plan.work)
        for row in plan.preempt:
            held = memory.kept.pop(row)
            if load["keeps"]:
                memory.parked[row] = held
            else:
                row.done = 0
        scheduler.apply(plan)
        for row in plan.admit:
            memory.kept[row] = memory.parked.pop(row, 0)
        assert len(scheduler.running) <= load["max_rows"]
        # all that decode take part
        decoding = {row for row in scheduler.running if row.left == 1 and row.done}
        assert decoding <= set(plan.work)
        if oldest is not None and oldest.left:
            assert plan.work[oldest] >= 1
        most = max(load["chunk"], load["max_rows"]) * (1 if decoding & set(before[0]) else ALONE)
        assert sum(plan.work.values()) <= most
        assert plan.work or not scheduler.running
        for row, count in plan.work.items():
            assert 1 <= count <= row.left
            memory.read(row, count, shares[row])
            for stop in load["stops"]:  # no read passes a boundary
                assert not row.done - count < stop < row.done
            if row.left == 0:
                row.tokens.append(0)
                if len(row.tokens) - row.prompt >= row.max_tokens:
                    end(scheduler, memory, row, ended)
        assert sum(memory.kept.values()) <= USABLE * load["budget"]
    assert len(ended) == len(load["rows"])
    assert not memory.kept
    assert not memory.parked
    assert not scheduler.running
    assert not scheduler.waiting


def end(scheduler, memory, row, ended):
    scheduler.remove(row)
    memory.kept.pop(row, None)
    memory.parked.pop(row, None)
    ended.add(row)


def test_a_long_prompt_delays_nobody_by_more_than_a_chunk():
    memory = Memory()
    scheduler = Scheduler(memory, 10**9, max_rows=32, chunk=64)
    streams = [Row([0] * 2, 1000) for _ in range(16)]
    for row in streams:
        scheduler.add(row)
    long = Row([0] * 8000, 10)
    for step in range(200):
        if step == 5:
            scheduler.add(long)
        plan = scheduler.plan()
        scheduler.apply(plan)
        for row in plan.admit:
            memory.kept[row] = 0
        for row, count in plan.work.items():
            memory.read(row, count, 0.5)
            if row.left == 0:
                row.tokens.append(0)
        if step:
            assert all(plan.work[row] == 1 for row in streams)
        assert sum(plan.work.values()) <= (64 if step else ALONE * 64)
    assert long.done >= 8000


def test_rows_come_in_the_order_of_their_arrival():
    memory = Memory()
    scheduler = Scheduler(memory, 1000, chunk=100, admission="worst")
    small, large, last = Row([0] * 20, 5), Row([0] * 80, 5), Row([0] * 5, 5)
    for row in (small, large, last):
        scheduler.add(row)
    plan = scheduler.plan()
    # the last one would fit, but the one before it came first
    assert plan.admit == [small]
