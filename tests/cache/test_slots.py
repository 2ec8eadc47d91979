"""SlotTable against plain Python sets, after any sequence of operations."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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


def new_table(rows, **options):
    extra = {"score": (), "per_head": (1,)}
    return SlotTable(rows, H, D, value_dim=DV, rank=R, extra=extra, **options)


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
        assert table.columns[name][:, : table.width][slots.valid].equal(want[slots.valid])
    rows = [row[ok].tolist() for row, ok in zip(slots.token, slots.valid, strict=True)]
    assert all(len(row) == len(set(row)) for row in rows)
    return [set(row) for row in rows]


class AnySequence(RuleBasedStateMachine):
    @initialize(rows=st.integers(1, 4))
    def start(self, rows):
        self.poison = poisoned()
        self.poison.start()
        self.table = new_table(rows)
        self.model = [set() for _ in range(rows)]
        self.next = 0

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
        free = [
            [s for s in range(10_000) if s >= self.table.width or not row[s]]
            for row in self.table.valid.tolist()
        ]
        push(self.table, token, valid)
        for b in range(B):
            new = token[b].tolist() if valid is None else token[b][valid[b]].tolist()
            self.model[b] |= set(new)
            assert self.table.token[b, free[b][: len(new)]].tolist() == new

    @rule(data=st.data(), how_much=st.sampled_from(["some", "most", "all"]))
    def remove(self, data, how_much):
        S = self.table.width
        mask = self.mask(data, S) if how_much != "all" else torch.ones(len(self.model), S) > 0
        if how_much == "most":
            mask |= self.mask(data, S)
        # a free slot may still show the number of a token that is in another slot now
        removed = mask & self.table.valid[:, :S]
        for b, row in enumerate(self.table.token[:, :S]):
            self.model[b] -= set(row[removed[b]].tolist())
        self.table.remove(mask)
        prefix = torch.arange(self.table.capacity) < self.table.kept[:, None]
        assert self.table.packed == self.table.valid.equal(prefix)
        assert self.table.load_factor >= self.table.min_load
        assert roomy(self.table.width) >= 0.9 * self.table.capacity

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
    def consolidate(self):
        self.table.consolidate()

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
        used = table.valid.any(0).nonzero()
        assert table.width == (int(used.max()) + 1 if len(used) else 0)
        prefix = torch.arange(table.capacity) < table.kept[:, None]
        # `packed` may stay False after a push that fills the last hole
        assert table.valid.equal(prefix) or not table.packed


AnySequence.TestCase.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, derandomize=True
)
TestAnySequence = AnySequence.TestCase


def filled_table(rows, tokens, **options):
    table = new_table(rows, **options)
    push(table, torch.arange(rows * tokens).view(rows, tokens))
    return table


def test_new_tokens_take_the_leftmost_free_slot():
    table = filled_table(2, 20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, 3] = mask[1, 7] = mask[1, 9] = True
    table.remove(mask)
    push(table, torch.tensor([[100, 101], [200, 201]]))
    assert table.token[0, [3, 20]].tolist() == [100, 101]
    assert table.token[1, [7, 9]].tolist() == [200, 201]
    assert table.width == 21


def test_consolidates_only_under_the_load_threshold():
    table = filled_table(1, 20)
    mask = torch.zeros(1, 20, dtype=torch.bool)
    mask[0, :2] = True
    table.remove(mask)
    assert (table.load_factor, table.width, table.packed) == (0.9, 20, False)
    mask[0, :3] = True
    table.remove(mask)
    assert (table.load_factor, table.width, table.packed) == (1.0, 17, True)
    # the last three fill the holes, no other token moves
    assert table.token[0, :17].tolist() == [17, 18, 19, *range(3, 17)]


def test_longest_row_sets_the_width():
    table = filled_table(2, 20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0] = True
    table.remove(mask)
    assert table.width == 20
    assert table.kept.tolist() == [0, 20]


def test_memory_shrinks_without_frequent_resizes():
    table = filled_table(2, 1000)
    full = table.nbytes
    per_slot = 2 * (H * (D + DV) * 4 + R * 4 + 8 + 1 + 4 + 4)
    assert full == table.capacity * per_slot <= 1000 * per_slot * 1.15
    table.remove(torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)) < 0.8)
    assert table.nbytes < 0.3 * full
    assert table.nbytes == table.capacity * per_slot <= table.width * per_slot * 1.3

    settled, resizes = table.capacity, 0
    for step in range(200):
        push(table, torch.full((2, 1), 10_000 + step))
        mask = torch.zeros(2, table.width, dtype=torch.bool)
        mask[:, step % table.width] = True
        table.remove(mask)
        resizes += table.capacity != settled
        settled = table.capacity
    assert resizes <= 1


def test_empty_push_and_remove():
    with poisoned():
        table = new_table(3)
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


def test_select_no_rows():
    table = filled_table(2, 5)
    table.select(torch.tensor([], dtype=torch.int64))
    assert (table.rows, table.width, table.nbytes) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_keeps_its_dtype_and_float32_interaction_keys(dtype):
    table = new_table(1, dtype=dtype)
    push(table, torch.arange(5)[None])
    assert (table.keys.dtype, table.values.dtype) == (dtype, dtype)
    assert table.key_int.dtype == torch.float32
    assert tokens_in(table) == [{0, 1, 2, 3, 4}]


def test_table_without_interaction_keys():
    table = SlotTable(1, H, D)
    table.push(torch.ones(1, H, 4, D), torch.ones(1, H, 4, D), None, torch.arange(4)[None])
    assert table.get().key_int.shape == (1, 4, 0)
    assert table.kept.tolist() == [4]


def test_table_created_in_inference_mode():
    with torch.inference_mode():
        table = filled_table(2, 3)
        table.select(torch.tensor([1, 0]))
    push(table, torch.tensor([[100], [101]]))
    table.remove(torch.zeros(2, 4, dtype=torch.bool))
    assert tokens_in(table) == [{3, 4, 5, 100}, {0, 1, 2, 101}]


def test_stored_keys_have_no_gradient():
    table = SlotTable(1, H, D)
    key = torch.ones(1, H, 1, D, requires_grad=True)
    table.push(key * 2, key * 3, None, torch.zeros(1, 1, dtype=torch.int64))
    assert not table.keys.requires_grad


def test_clone_is_independent():
    table = filled_table(2, 4)
    other = table.clone()
    other.release(torch.tensor([0, 1]))
    assert table.kept.tolist() == [4, 4]
    assert table.to("cpu") is table


def test_errors_name_the_column_and_the_shape():
    table = new_table(2)
    key, value, key_int, extra = contents(torch.arange(2)[:, None])
    with pytest.raises(PruneError, match="score"):
        table.push(key, value, key_int, torch.arange(2)[:, None], per_head=extra["per_head"])
    with pytest.raises(PruneError, match=r"keys has the shape \(2, 1, 1, 3\).*\(2, 2, 1, 3\)"):
        table.push(key[:, :1], value, key_int, torch.arange(2)[:, None], **extra)
