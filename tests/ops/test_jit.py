"""Numba's compiler tells when it works, and not when a kernel is there already."""

from kvprune.ops.jit import njit, on_compile


def test_on_compile():
    @njit()
    def double(x):
        return 2 * x

    calls = []
    with on_compile(lambda: calls.append("compiled")):
        assert double(2) == 4
        assert calls == ["compiled"]
        assert double(3) == 6
        assert calls == ["compiled"]
        assert double(1.5) == 3.0
        assert calls == ["compiled"] * 2
    assert double(1j) == 2j
    assert calls == ["compiled"] * 2
