"""The compiler's report says what a kernel takes: what is asserted with it can fail."""

import pytest
import triton.language as tl

from ahead import TARGETS, check, compile_for
from kvprune.ops.gpu import jit

every_target = pytest.mark.parametrize("target", TARGETS)


@jit
def centred(x, y, SIZE: tl.constexpr):
    """Numbers stay in registers until their sum is known, which passes through shared memory."""
    i = tl.arange(0, SIZE)
    numbers = tl.load(x + i)
    tl.store(y + i, numbers - tl.sum(numbers, 0))


def compiled(target, size, **options):
    return compile_for(target, centred, {"x": "*fp32", "y": "*fp32"}, {"SIZE": size}, **options)


@every_target
def test_what_fits(target):
    got = compiled(target, 2048)
    assert got.shared
    assert got.registers >= 2048 // got.threads
    check(target, got)


@every_target
def test_what_does_not_fit_is_noticed(target):
    # on AMD, an eighth of the registers for each of eight waves
    size, own = (2**13, {"waves_per_eu": 8}) if target == "gfx942" else (2**14, {})
    got = compiled(target, size, num_warps=1, **own)
    assert got.spilled
    with pytest.raises(AssertionError, match=r"Resources"):
        check(target, got)
    with pytest.raises(AssertionError, match=r"shared=1000000"):
        check(target, got._replace(spilled=0, shared=10**6))
