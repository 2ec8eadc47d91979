"""Every operation that has kernels, in the order in which a model meets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvprune.doctor import inputs
from kvprune.doctor.inputs import Error
from kvprune.ops.alpha_sigmoid import ALPHA_SIGMOID, LOG_ALPHA_SIGMOID
from kvprune.ops.attend.soft import SOFT_BACKWARD, SOFT_FORWARD
from kvprune.ops.decode import DECODE, REMOVE
from kvprune.ops.dispatch import Operation
from kvprune.ops.hard import HARD_ATTENTION
from kvprune.ops.int8 import QUANTISE
from kvprune.ops.keep import LOG_KEEP, LOG_KEEP_BACKWARD
from kvprune.ops.keep.drop import DROP_STEPS
from kvprune.ops.linear import LINEAR, MOST_ROWS
from kvprune.ops.norm import RMS_NORM
from kvprune.ops.swiglu import SWIGLU

F32, BF16, F16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
# of a result that is rounded to its dtype; and where the sum before it has another order
ROUNDING = {F32: 2e-5, BF16: 1e-2, F16: 2e-3, INT8: 2e-5}
EXACT = dict.fromkeys(ROUNDING, 0.0)
GATES = dict.fromkeys(ROUNDING, 1e-6)


class Entry(NamedTuple):
    """One operation: what for, in which dtypes it is met, and how it is tested."""

    operation: Operation[Any, Any]
    used_for: str
    dtypes: tuple[torch.dtype, ...]
    # the largest difference between a backend on a device and the reference on the CPU
    error: Callable[[str, torch.dtype, torch.device], Error]
    allowed: dict[torch.dtype, float]


FLOATS = (F32, BF16, F16)
ENTRIES = (
    Entry(DECODE, "each new token", (*FLOATS, INT8), inputs.decode, ROUNDING),
    Entry(REMOVE, "tokens that leave", (*FLOATS, INT8), inputs.remove, EXACT),
    Entry(DROP_STEPS, "votes on a prompt", (F32,), inputs.drop_steps, EXACT),
    Entry(HARD_ATTENTION, "attention of a prompt", FLOATS, inputs.hard_attention, ROUNDING),
    Entry(LINEAR, f"products with up to {MOST_ROWS} rows", FLOATS, inputs.linear, ROUNDING),
    Entry(RMS_NORM, "norms", FLOATS, inputs.rms_norm, ROUNDING),
    Entry(SWIGLU, "gated activations", FLOATS, inputs.swiglu, ROUNDING),
    Entry(QUANTISE, "tokens stored as int8", FLOATS, inputs.quantise, EXACT),
    Entry(ALPHA_SIGMOID, "gates", (F32,), inputs.gate(ALPHA_SIGMOID), GATES),
    Entry(LOG_ALPHA_SIGMOID, "gates in training", (F32,), inputs.gate(LOG_ALPHA_SIGMOID), GATES),
    Entry(SOFT_FORWARD, "attention in training", FLOATS, inputs.soft_forward, ROUNDING),
    Entry(SOFT_BACKWARD, "its gradients", FLOATS, inputs.soft_backward, ROUNDING),
    Entry(LOG_KEEP, "keep, by plain attention", (F32,), inputs.log_keep, ROUNDING),
    Entry(LOG_KEEP_BACKWARD, "its gradients", (F32,), inputs.log_keep_backward, ROUNDING),
)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
