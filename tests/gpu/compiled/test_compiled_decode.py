"""The decode kernels fit on every device, and keep their numbers in registers."""

import pytest
import torch

from ahead import TARGETS, check, compile_for, compiled_kernel
from kvprune.ops.decode import triton_kernels
from kvprune.ops.decode.triton import LARGEST_GROUP, MOST_SPLITS, PLAN_BLOCK, WIDEST, Shape, power

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
}
# of each class of widths the widest; stored keys and values, interaction keys
CLASSES = [(64, 64), (128, 64), (WIDEST, 128)]
FORMS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.int8, torch.int8),
]
# all that a call may ask for at once
EVERYTHING = {"VOTES": True, "PADDED": True, "ALSO": True, "CAPPED": True, "SPLITS": MOST_SPLITS}

every_target = pytest.mark.parametrize("target", TARGETS)


def shape(width, rank, stored, int_stored):
    return Shape(8, LARGEST_GROUP, width, width, rank, 1, stored, int_stored, 16)


def types(kv, interaction):
    int64s = "where kept number dropped"
    floats = "query query_int extra beta output top total"
    return {
        **dict.fromkeys(int64s.split(), "*i64"),
        **dict.fromkeys(floats.split(), "*fp32"),
        **dict.fromkeys(("key", "value"), POINTERS[kv]),
        **dict.fromkeys(("key_scale", "value_scale", "key_int_scale"), "*fp16"),
        **dict.fromkeys(("active", "also_drop"), "*i1"),
        **dict.fromkeys(("threshold", "scaling", "softcap"), "fp32"),
        **dict.fromkeys(("protect_first", "protect_recent", "width", "also_width"), "i32"),
        "key_int": POINTERS[interaction],
    }


@every_target
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("width", "rank"), CLASSES)
def test_attend(target, form, width, rank):
    constants, launch = shape(width, rank, *form).attend()
    arguments = types(*form), constants | EVERYTHING
    check(target, compile_for(target, triton_kernels.attend, *arguments, **launch))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_keys_and_values_are_read_in_whole_vectors(form):
    """16 bytes at once, past the registers, while the block before is computed."""
    constants, launch = shape(128, 64, *form).attend()
    arguments = types(*form), constants | EVERYTHING
    text = compiled_kernel("sm_90", triton_kernels.attend, *arguments, **launch).asm["ptx"]
    # "cg" copies 16 bytes, "ca" fewer
    assert text.count("cp.async.cg") >= 4


@every_target
def test_what_follows_the_attention(target):
    number = {"kept": "*i64", "dropped": "*i64", "count": "*i64", "width": "i32"}
    tables = {**number, "active": "*i1", "moves": "*i32", "where": "*i64"}
    own = {"PADDED": True, "NEW": 1, "BLOCK": PLAN_BLOCK}
    check(target, compile_for(target, triton_kernels.plan, tables, own))
    for form in FORMS:
        constants, launch = shape(WIDEST, 128, *form).move()
        check(target, compile_for(target, triton_kernels.move, tables, constants, **launch))
    sums = dict.fromkeys(("parts", "top", "total", "output"), "*fp32")
    own = {"DV": WIDEST, "VALUE": power(WIDEST, 16), "SPLITS": MOST_SPLITS}
    check(target, compile_for(target, triton_kernels.combine, sums, own))
