"""Kernels of training and of prompts, compiled for every device: what they take of it.

The host's code runs, on numbers that nobody looks at, and each kernel that it would launch is
compiled as it would be. Tiles shrink as rows get wider: the widest rows of each size are tested.
"""

from contextlib import contextmanager

import pytest
import torch

from ahead import TARGETS, check, compile_for
from kvprune.ops.alpha_sigmoid import triton as alpha_sigmoid
from kvprune.ops.attend import triton as attend
from kvprune.ops.attend.options import Options
from kvprune.ops.form import AttentionForm
from kvprune.ops.gate import Gate
from kvprune.ops.hard import triton as hard
from kvprune.ops.keep.drop import triton as drop
from kvprune.ops.timeline import make_timeline

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
MODULES = (alpha_sigmoid, attend, hard, drop)
CPU = torch.device("cpu")


class Launched:
    """Stands in for a kernel: notes how it is launched."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, **constants):
            types = dict(zip(self.kernel.arg_names, map(type_of, args), strict=False))
            self.launches[self.kernel.__name__] = self.kernel, types, constants

        return launch


def type_of(argument):
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i64" if argument >= 2**31 else "i32"


@contextmanager
def noted_launches():
    """In the block nothing is launched: by name, each kernel with types and constants."""
    noted = {}
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            for name, kernel in vars(module).copy().items():
                if hasattr(kernel, "arg_names"):
                    patch.setattr(module, name, Launched(kernel, noted))
        yield noted


def compile_all(target, launches, spills=0):
    for kernel, types, constants in launches.values():
        own = set(kernel.arg_names)
        options = {key: value for key, value in constants.items() if key not in own}
        constants = {key: value for key, value in constants.items() if key in own}
        options.pop("enable_fp_fusion")
        got = compile_for(target, kernel, types, constants, aligned=True, **options)
        check(target, got, spills)


def train(dtype, D, R, everything):
    """Forward and backward pass of one row, all of it uninitialised; with all options, or none."""
    T, heads, kv_heads, layers = 4, 4, 2, 2 if everything else 1
    q, k, v = (torch.zeros(1, h, T, D, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    flat = [torch.zeros(1, T, R), torch.zeros(1, T, R), torch.zeros(())] * layers
    form = AttentionForm(0.1, 30.0, 0.1) if everything else AttentionForm(0.1)
    options = Options(make_timeline(None, (1, T), CPU), Gate("alpha", 1.5), form, 128, None, 2**61)
    sinks = torch.zeros(heads) if everything else None
    done = attend.soft_forward(q, k, v, sinks, flat, options)
    attend.soft_backward(q, k, v, sinks, flat, done, done.out, torch.zeros(1), options)


def device(monkeypatch, target):
    monkeypatch.setattr("torch.version.hip", "7.0" if target == "gfx942" else None)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "D", "R", "everything"),
    [(torch.bfloat16, 128, 64, False), (torch.float32, 256, 256, True)],
)
def test_training(monkeypatch, target, dtype, D, R, everything):
    device(monkeypatch, target)
    with noted_launches() as launches:
        train(dtype, D, R, everything)
    assert len(launches) == 7
    # wide rows of float32 do not fit into the registers; on sm_100 eight bytes of the rest
    compile_all(target, launches, spills=8192 if everything else 8)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "D"), [(torch.bfloat16, 128), (torch.float32, 256)])
def test_prompts(monkeypatch, target, dtype, D):
    device(monkeypatch, target)
    q = torch.zeros(1, 4, 3, D, dtype=dtype)
    k, steps = torch.zeros(1, 2, 8, D, dtype=dtype), torch.zeros(1, 8, dtype=torch.long)
    time, ints = make_timeline(None, (1, 3), CPU), torch.zeros(1, 3, D)
    with noted_launches() as launches:
        hard.hard_attention(q, k, k, steps, AttentionForm(0.1, 30.0, sinks=torch.zeros(4)))
        drop.drop_steps(ints, ints, torch.zeros(()), time)
    assert len(launches) == 3
    compile_all(target, launches, spills=0 if dtype is torch.bfloat16 else 1024)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("alpha", [1.5, float("inf")])
def test_gates(monkeypatch, target, alpha):
    x = torch.zeros(4, requires_grad=True)
    for function in (alpha_sigmoid.alpha_sigmoid, alpha_sigmoid.log_alpha_sigmoid):
        with noted_launches() as launches:
            torch.autograd.grad(function(x, alpha).sum(), x)
        compile_all(target, launches)
