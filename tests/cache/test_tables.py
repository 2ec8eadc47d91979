"""Both tables against plain Python sets, after any sequence of operations."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from arenas import check_arena
from kvprune.cache.arena import Arena
from kvprune.cache.extents import ExtentTable
from kvprune.cache.slots import SlotTable, roomy
from kvprune.errors import PruneError
from poisoned_memory import poisoned

H, D, DV, R = 2, 3, 2, 1


def contents(token):
    """The columns of a token, all computed from its number, so that equality is exact."""
    token = token.float()
    heads = torch.arange(H).float()[:, None, None]
    key = token[:, None, :, None] * 8 + heads * 4 + torch.arange(D)  # (B, H, T, D)
    value = -token[:, None, :, None] * 8 - heads * 4 - torch.arange(DV)
    return (
        key,
        value,
        token[..., None] + 0.5,
        {"score": token * 2, "per_head": token[..., None] * 3},
    )


def new_table(kind, rows, **options):
    extra = {"score": (), "per_head": (1,)}
    return kind(rows, H, D, value_dim=DV, rank=R, extra=extra, **options)


def push(table, token, valid=None):
    key, value, key_int, extra = contents(token)
    table.push(key, value, key_int, token, valid, **extra)


def tokens_in(table):
    """The tokens in each row; checks all their columns."""
    slots = table.get()
    key, value, key_int, extra = contents(slots.token)
    for want, got in [(key, slots.keys), (value, slots.values)]:
        assert got[slots.valid[:, None, :, None].expand_as(got)].equal(
            want[slots.valid[:, None, :, None].expand_as(want)]
        )
        assert got.isfinite().all()
    assert slots.key_int[slots.valid].equal(key_int[slots.valid])
    for name, want in extra.items():
        assert table.column(name)[slots.valid].equal(want[slots.valid])
    rows = [row[ok].tolist() for row, ok in zip(slots.token, slots.valid, strict=True)]
    assert all(len(row) == len(set(row)) for row in rows)
    return [set(row) for row in rows]


class AnySequence(RuleBasedStateMachine):
    """What both tables must do; the model is a set of tokens per row."""

    kind: type

    @initialize(rows=st.integers(1, 4))
    def start(self, rows):
        self.poison = poisoned()
        self.poison.start()
        self.table = self.new(rows)
        self.model = [set() for _ in range(rows)]
        self.next = 0

    def new(self, rows):
        return new_table(self.kind, rows)

    def teardown(self):
        if hasattr(self, "poison"):
            self.poison.stop()

    def mask(self, data, width):
        bits = st.lists(st.booleans(), min_size=width, max_size=width)
        rows = [data.draw(bits) for _ in self.model]
        return torch.tensor(rows, dtype=torch.bool).view(len(rows), width)

    @rule(T=st.sampled_from([0, 1, 1, 1, 2, 5, 40]), padded=st.booleans(), data=st.data())
    def push(self, T, padded, data):
        B = len(self.model)
        token = self.next + torch.arange(B * T).view(B, T)
        self.next += B * T
        valid = self.mask(data, T) if padded else None
        push(self.table, token, valid)
        for b in range(B):
            new = token[b].tolist() if valid is None else token[b][valid[b]].tolist()
            self.model[b] |= set(new)

    @rule(data=st.data(), how_much=st.sampled_from(["some", "most", "all"]))
    def remove(self, data, how_much):
        S = self.table.width
        mask = self.mask(data, S) if how_much != "all" else torch.ones(len(self.model), S) > 0
        if how_much == "most":
            mask |= self.mask(data, S)
        token, valid = self.table.members()
        # a free slot may still show the number of a token that is in another slot now
        for b, row in enumerate(token):
            self.model[b] -= set(row[mask[b] & valid[b]].tolist())
        self.table.remove(mask)
        self.after_remove()

    def after_remove(self):
        pass

    @rule(data=st.data())
    def select(self, data):
        B = len(self.model)
        rows = data.draw(st.lists(st.integers(0, B - 1), min_size=1, max_size=4))
        self.model = [set(self.model[b]) for b in rows]
        self.table.select(torch.tensor(rows))

    @precondition(lambda self: len(self.model) <= 2)
    @rule(times=st.integers(1, 2))
    def repeat(self, times):
        self.model = [set(row) for row in self.model for _ in range(times)]
        self.table.repeat(times)

    @precondition(lambda self: len(self.model) < 6)
    @rule(data=st.data())
    def join(self, data):
        """A new row with the tokens of another, as a snapshot brings them."""
        b = data.draw(st.integers(0, len(self.model) - 1))
        columns = {name: column.clone() for name, column in self.table.row(b).items()}
        before = self.where()
        self.table.add_rows(1)
        self.table.put(len(self.model), columns)
        assert self.where()[:-1] == before
        self.model.append(set(self.model[b]))

    @precondition(lambda self: len(self.model) > 1)
    @rule(data=st.data())
    def leave(self, data):
        b = data.draw(st.integers(0, len(self.model) - 1))
        rows = [i for i in range(len(self.model)) if i != b]
        before = self.where()
        self.table.select(torch.tensor(rows))
        self.model = [self.model[i] for i in rows]
        self.after_leave([before[i] for i in rows])

    def where(self):
        return [None] * self.table.rows

    def after_leave(self, before):
        pass

    @rule(data=st.data())
    def release(self, data):
        b = data.draw(st.integers(0, len(self.model) - 1))
        self.model[b] = set()
        self.table.release(torch.tensor([b]))

    @rule()
    def pack(self):
        self.table.pack()
        assert self.table.packed
        prefix = torch.arange(self.table.width) < self.table.kept[:, None]
        assert self.table.get().valid.equal(prefix)

    @rule()
    def copy(self):
        old, self.table = self.table, copy.deepcopy(self.table)
        old.release(torch.arange(old.rows))

    @invariant()
    def equals_the_sets(self):
        if not hasattr(self, "table"):
            return
        table = self.table
        assert tokens_in(table) == self.model
        assert table.kept.tolist() == [len(row) for row in self.model]
        assert table.longest == max(map(len, self.model))
        self.check_table()


class AnySequenceOfSlots(AnySequence):
    kind = SlotTable

    def after_remove(self):
        prefix = torch.arange(self.table.capacity) < self.table.kept[:, None]
        assert self.table.packed == self.table.valid.equal(prefix)
        assert self.table.load_factor >= self.table.min_load
        assert roomy(self.table.width) >= 0.9 * self.table.capacity

    @rule()
    def consolidate(self):
        self.table.consolidate()

    def check_table(self):
        table = self.table
        used = table.valid.any(0).nonzero()
        assert table.width == (int(used.max()) + 1 if len(used) else 0)
        prefix = torch.arange(table.capacity) < table.kept[:, None]
        # `packed` may stay False after a push that fills the last hole
        assert table.valid.equal(prefix) or not table.packed


class AnySequenceOfExtents(AnySequence):
    kind = ExtentTable

    def new(self, rows):
        # another table in the same arena, which nothing that happens here may touch
        self.arena = Arena()
        self.other = new_table(ExtentTable, 2, arena=self.arena)
        push(self.other, torch.arange(14).view(2, 7))
        return new_table(ExtentTable, rows, arena=self.arena)

    def after_remove(self):
        roomy = self.table.kept + self.table.kept // 16 + 4
        assert (roomy >= 0.85 * self.table.capacity).all()

    def where(self):
        return self.table.offsets()

    def after_leave(self, before):
        assert self.table.offsets() == before

    def check_table(self):
        assert tokens_in(self.other) == [set(range(7)), set(range(7, 14))]
        assert self.table.capacity.ge(self.table.kept).all()
        check_arena(self.arena, [self.table, self.other])


for machine in (AnySequenceOfSlots, AnySequenceOfExtents):
    machine.TestCase.settings = settings(
        max_examples=80, stateful_step_count=25, deadline=None, derandomize=True
    )
TestAnySequenceOfSlots = AnySequenceOfSlots.TestCase
TestAnySequenceOfExtents = AnySequenceOfExtents.TestCase

every_table = pytest.mark.parametrize("kind", [SlotTable, ExtentTable])


def filled_table(kind, rows, tokens, **options):
    table = new_table(kind, rows, **options)
    push(table, torch.arange(rows * tokens).view(rows, tokens))
    return table


@every_table
def test_empty_push_and_remove(kind):
    with poisoned():
        table = new_table(kind, 3)
        push(table, torch.zeros(3, 0, dtype=torch.int64))
        table.remove(torch.zeros(3, 0, dtype=torch.bool))
        table.pack()
        table.select(torch.tensor([2, 0]))
        assert (table.width, table.nbytes, table.load_factor) == (0, 0, 1.0)
        assert table.kept.tolist() == [0, 0]
        push(table, torch.arange(2)[:, None], torch.zeros(2, 1, dtype=torch.bool))
        assert tokens_in(table) == [set(), set()]
        push(table, torch.arange(2)[:, None])
        assert tokens_in(table) == [{0}, {1}]


@every_table
def test_select_no_rows(kind):
    table = filled_table(kind, 2, 5)
    table.select(torch.tensor([], dtype=torch.int64))
    assert (table.rows, table.width, table.nbytes) == (0, 0, 0)


@every_table
def test_table_without_interaction_keys(kind):
    table = kind(1, H, D)
    table.push(torch.ones(1, H, 4, D), torch.ones(1, H, 4, D), None, torch.arange(4)[None])
    assert table.get().key_int.shape == (1, 4, 0)
    assert table.kept.tolist() == [4]


@every_table
def test_table_created_in_inference_mode(kind):
    with torch.inference_mode():
        table = filled_table(kind, 2, 3)
        table.select(torch.tensor([1, 0]))
    push(table, torch.tensor([[100], [101]]))
    table.remove(torch.zeros(2, 4, dtype=torch.bool))
    assert tokens_in(table) == [{3, 4, 5, 100}, {0, 1, 2, 101}]


@every_table
def test_clone_is_independent(kind):
    table = filled_table(kind, 2, 4)
    other = table.clone()
    other.release(torch.tensor([0, 1]))
    assert table.kept.tolist() == [4, 4]


@every_table
def test_errors_name_the_column_and_the_shape(kind):
    table = new_table(kind, 2)
    key, value, key_int, extra = contents(torch.arange(2)[:, None])
    with pytest.raises(PruneError, match="score"):
        table.push(key, value, key_int, torch.arange(2)[:, None], per_head=extra["per_head"])
    with pytest.raises(PruneError, match=r"keys has the shape \(2, 1, 1, 3\).*\(2, 2, 1, 3\)"):
        table.push(key[:, :1], value, key_int, torch.arange(2)[:, None], **extra)
