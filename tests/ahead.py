"""Triton's kernels compiled for devices that are not here, and what they take of them."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvprune.ops.gpu import FUSION


class Limits(NamedTuple):
    """Of one block of threads."""

    shared: int  # bytes
    registers: int  # per thread
    of_all_threads: int  # registers


class Resources(NamedTuple):
    """What the compiler says that a kernel takes."""

    shared: int  # bytes per block of threads
    registers: int  # per thread
    spilled: int  # bytes per thread on NVIDIA, registers on AMD
    threads: int


TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
LIMITS = {
    "sm_80": Limits(163 * 1024, 255, 2**16),
    "sm_90": Limits(227 * 1024, 255, 2**16),
    "sm_100": Limits(227 * 1024, 255, 2**16),
    # 512 per lane in each of four parts of a compute unit, vectors and accumulators together
    "gfx942": Limits(64 * 1024, 512, 512 * 64 * 4),
}


def compiled_kernel(
    target, kernel, types, constants, num_warps=4, num_stages=1, aligned=False, **options
):
    """What Triton makes of a kernel; `types` as Triton writes them ("*fp32", "i32") by argument.

    Arguments in `constants` may be left out of `types`. `aligned`: pointers are multiples of 16, as
    those of a tensor are; then a thread loads 16 bytes at once.
    """
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    assert all(name in constants for name, kind in signature.items() if kind == "constexpr")
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers if aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    options |= {"num_warps": num_warps, "num_stages": num_stages, **FUSION}
    return triton.compile(source, target=TARGETS[target], options=options)


def compile_for(target, kernel, types, constants, num_warps=4, **options):
    """What a kernel takes of a device; arguments as those of `compiled_kernel`."""
    compiled = compiled_kernel(target, kernel, types, constants, num_warps, **options)
    threads = num_warps * TARGETS[target].warp_size
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers = number(r"\.vgpr_count:\s+(\d+)", text)
        spilled = number(r"\.vgpr_spill_count:\s*(\d+)", text)
        spilled += number(r"\.private_segment_fixed_size:\s*(\d+)", text)
        return Resources(shared, registers, spilled, threads)
    text = usage_of(compiled.asm["cubin"])
    # the stack is where registers are spilled to
    spilled = number(r"STACK:(\d+)", text) + number(r"LOCAL:(\d+)", text)
    return Resources(shared, number(r"REG:(\d+)", text), spilled, threads)


def check(target, got, spills=0):
    """Raise unless it fits, and no more than `spills` bytes of a thread leave the registers."""
    limits = LIMITS[target]
    assert got.shared <= limits.shared, (target, got)
    assert got.registers <= limits.registers, (target, got)
    assert got.registers * got.threads <= limits.of_all_threads, (target, got)
    assert got.spilled <= spills, (target, got)


def usage_of(cubin):
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, check=True)
    return done.stdout.decode()


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, (pattern, text)
    return int(found.group(1))
