"""What is particular to SlotTable: leftmost free slots, load factor, one capacity for all rows."""

import pytest
import torch
from test_tables import DV, D, H, R, filled_table, new_table, push, tokens_in

from kvprune.cache.slots import SlotTable


def test_new_tokens_take_the_leftmost_free_slot():
    table = filled_table(SlotTable, 2, 20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, 3] = mask[1, 7] = mask[1, 9] = True
    table.remove(mask)
    push(table, torch.tensor([[100, 101], [200, 201]]))
    assert table.token[0, [3, 20]].tolist() == [100, 101]
    assert table.token[1, [7, 9]].tolist() == [200, 201]
    assert table.width == 21


def test_consolidates_only_under_the_load_threshold():
    table = filled_table(SlotTable, 1, 20)
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
    table = filled_table(SlotTable, 2, 20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0] = True
    table.remove(mask)
    assert table.width == 20
    assert table.kept.tolist() == [0, 20]


def test_memory_shrinks_without_frequent_resizes():
    table = filled_table(SlotTable, 2, 1000)
    full = table.nbytes
    per_slot = 2 * (H * (D + DV) * 4 + R * 4 + 4 + 1 + 4 + 4)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_keeps_its_dtype_and_float32_interaction_keys(dtype):
    table = new_table(SlotTable, 1, dtype=dtype)
    push(table, torch.arange(5)[None])
    assert (table.keys.dtype, table.values.dtype) == (dtype, dtype)
    assert table.key_int.dtype == torch.float32
    assert tokens_in(table) == [{0, 1, 2, 3, 4}]


def test_stored_keys_have_no_gradient():
    table = SlotTable(1, H, D)
    key = torch.ones(1, H, 1, D, requires_grad=True)
    table.push(key * 2, key * 3, None, torch.zeros(1, 1, dtype=torch.int64))
    assert not table.keys.requires_grad
