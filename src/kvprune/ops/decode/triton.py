"""The decode step on rows in extents by Triton's kernels; float32, bfloat16, float16 and int8.

Per step and layer, for each row of n survivors, with H key heads of D + Dv numbers of s bytes, Hq
query heads, interaction keys of r numbers of i bytes, and m tokens that move:

    bytes ≈ n (H (D + Dv) s + r i + 4)        once: all Hq / H heads of a group share a load
          + 24 n + 2 m H (D + Dv) s           who has left, and the moves
    FLOPs ≈ 2 n (Hq (D + Dv) + H r)           the vote is made anew by each key head

int8 adds 4 H bytes of scales per token. There are about 2 Hq / (H s) FLOPs per byte, a few: on any
GPU memory decides. Dense decoding reads N H (D + Dv) s bytes, for all N tokens seen.

With a length that the host only knows a bound of, nothing here waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from kvprune.ops.decode import reference, triton_kernels
from kvprune.ops.decode.reference import Decoded, NewToken, Votes
from kvprune.ops.decode.table import PLACES, DevicePlaces, Table, join_columns
from kvprune.ops.form import AttentionForm
from kvprune.ops.gpu import FUSION
from kvprune.ops.int8.reference import quantise

TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
}

# wider heads or votes, or larger groups, would not fit into registers: the reference takes them
WIDEST, WIDEST_VOTE, LARGEST_GROUP = 256, 128, 16
# slots per turn of `plan`, which reads a number of each
PLAN_BLOCK = 256
# programs to keep all processors of a large GPU busy, and the least slots worth a program
PROGRAMS, MIN_SPAN, MOST_SPLITS = 256, 256, 32


class Shape(NamedTuple):
    """The numbers that the kernels are compiled for."""

    H: int
    G: int
    D: int
    DV: int
    R: int
    E: int
    stored: torch.dtype
    int_stored: torch.dtype
    align: int

    def sizes(self) -> dict[str, Any]:
        """As arguments that all kernels share; ranges are powers of two."""
        return {
            "H": self.H, "D": self.D, "DV": self.DV, "R": self.R, "E": self.E,
            "KEY": power(self.D, 16), "VALUE": power(self.DV, 16), "INT": power(self.R, 1),
            "EXTRAS": power(self.E, 1), "STORED": TYPES[self.stored],
            "INT_STORED": TYPES[self.int_stored], "ALIGN": self.align,
            "SCALED": self.stored is torch.int8, "INT_SCALED": self.int_stored is torch.int8,
        }  # fmt: skip

    def attend(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Arguments of `attend`, and how it is launched."""
        widest = max(power(self.D, 16), power(self.DV, 16), power(self.R, 16))
        own = {
            "G": self.G,
            "GROUP": power(self.G, 16),
            "BLOCK": self.block(widest),
            "PRECISION": "ieee" if self.stored is torch.float32 else "tf32",
        }
        return self.sizes() | own, {"num_warps": 8 if widest > 128 else 4, "num_stages": 2}

    def block(self, widest: int) -> int:
        """As many slots at once as stay in registers, which the tests of the compiler see."""
        return 16 if self.stored is torch.float32 or widest > 128 else 32

    def move(self) -> tuple[dict[str, Any], dict[str, int]]:
        return self.sizes() | {"BLOCK": 16}, {"num_warps": 4, "num_stages": 1}


@torch.no_grad()
def decode(
    table: Table,
    new: NewToken,
    form: AttentionForm,
    *,
    votes: Votes | None = None,
    also_drop: Tensor | None = None,
    weights: bool = False,
) -> Decoded:
    """`reference.decode`, but nothing waits for the device, and each key is read once.

    With `weights`, and for heads and groups beyond WIDEST, it is the reference itself.
    """
    query, key, value = new[:3]
    R = 0 if votes is None else votes.query_int.shape[-1]
    group = query.shape[1] // key.shape[1]
    wide = max(query.shape[-1], value.shape[-1]) > WIDEST or R > WIDEST_VOTE
    if weights or wide or group > LARGEST_GROUP:
        return reference.decode(table, new, form, votes=votes, also_drop=also_drop, weights=weights)
    # Triton launches on the current device, which need not be this one
    with torch.cuda.device_of(query):
        return _decode(table, new, form, votes, also_drop)


def _decode(
    table: Table, new: NewToken, form: AttentionForm, votes: Votes | None, also_drop: Tensor | None
) -> Decoded:
    query, key, value, number, active, extra = new
    B, Hq = query.shape[:2]
    device = query.device
    if votes is None:
        votes = Votes(torch.zeros(B, 0, device=device), torch.zeros(B, 0, device=device), 0.0)
    own = {"keys": key, "values": value, "key_int": votes.key_int[:, None]}
    table.check({**own, "token": number[:, None], **extra})
    places, also_drop = table.prepare_on_device(also_drop)
    shape = shape_of(places, Hq)
    if places.rotation is not None:
        query, key = query.float() @ places.rotation, key.float() @ places.rotation
    new_key, key_scale = stored(key[:, :, 0], places.stored)
    new_value, value_scale = stored(value[:, :, 0], places.stored)
    key_int, key_int_scale = stored(votes.key_int, places.int_stored)
    beta = votes.beta
    beta = beta.float() if isinstance(beta, Tensor) else torch.full((1,), beta, device=device)
    dropped = torch.full((B, places.most), -1, device=device)
    output = torch.empty(B, Hq, 1, shape.DV, dtype=new.query.dtype, device=device)
    splits = spans(B * shape.H, places.most)
    lines = output if splits == 1 else torch.empty(B, Hq, splits, shape.DV, device=device)
    top, total = torch.empty(2, B, Hq, splits, device=device)
    constants, launch = shape.attend()
    triton_kernels.attend[B, shape.H, splits](
        places.where, places.kept, query.contiguous(), new_key, new_value, key_scale, value_scale,
        votes.query_int.float().contiguous(), key_int, key_int_scale,
        join_columns(extra, number[:, None])[:, 0].contiguous(), number.long().contiguous(),
        number if active is None else active.contiguous(),
        number if also_drop is None else also_drop.contiguous(),
        beta, dropped, lines, top, total, float(votes.threshold), votes.protect_first,
        votes.protect_recent, float(form.scaling), float(form.softcap or 1.0), places.most,
        0 if also_drop is None else also_drop.shape[1],
        **constants, VOTES=shape.R > 0, PADDED=active is not None, ALSO=also_drop is not None,
        CAPPED=form.softcap is not None, SPLITS=splits, **launch, **FUSION,
    )  # fmt: skip
    if splits > 1:
        triton_kernels.combine[(B * Hq,)](
            lines, top, total, output, shape.DV, power(shape.DV, 16), splits, **FUSION
        )
    close(places, shape, dropped, active, new=1)
    table.finish()
    return Decoded(output, dropped, None)


@torch.no_grad()
def remove(table: Table, mask: Tensor) -> None:
    """`reference.remove`: the last tokens of a row move into the slots of `mask` (B, S)."""
    with torch.cuda.device_of(mask):
        places, packed = table.prepare_on_device(mask, room=0)
        assert packed is not None
        close(places, shape_of(places, 0), packed.long() - 1, None, new=0)
        table.finish()


def close(
    places: DevicePlaces, shape: Shape, dropped: Tensor, active: Tensor | None, new: int
) -> None:
    """Fill the slots of the dropped, (B, S) ≥ 0, and count who stays."""
    B, S = dropped.shape
    moves = torch.empty(B, S, 2, dtype=torch.int32, device=dropped.device)
    count = torch.empty(B, dtype=torch.int64, device=dropped.device)
    triton_kernels.plan[(B,)](
        places.kept, count if active is None else active, dropped, moves, count, S,
        PADDED=active is not None, NEW=new, BLOCK=PLAN_BLOCK, **FUSION,
    )  # fmt: skip
    constants, launch = shape.move()
    triton_kernels.move[B, shape.H + 1](places.where, moves, count, S, **constants, **launch)


def shape_of(places: DevicePlaces, query_heads: int) -> Shape:
    """From the heads and bytes of each column."""
    sizes = dict(zip(PLACES, places.widths.tolist(), strict=False))
    size, int_size = places.stored.itemsize, places.int_stored.itemsize
    heads = sizes["keys"][0]
    return Shape(
        heads, query_heads // heads, sizes["keys"][1] // size, sizes["values"][1] // size,
        sizes["key_int"][1] // int_size, sizes["extra"][1] // 4, places.stored, places.int_stored,
        places.align,
    )  # fmt: skip


def stored(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """New vectors as they are stored, and their scales, which only int8 has."""
    if dtype is torch.int8:
        numbers, scale = quantise(x)
        return numbers.contiguous(), scale.contiguous()
    x = x.to(dtype).contiguous()
    return x, x


def spans(programs: int, slots: int) -> int:
    """Into how many spans a row is split: a power of two."""
    wanted = min(-(-PROGRAMS // programs), -(-slots // MIN_SPAN), MOST_SPLITS)
    return power(wanted, 1)


def power(x: int, least: int) -> int:
    """The next power of two."""
    return max(least, 1 << (x - 1).bit_length() if x else 0)
