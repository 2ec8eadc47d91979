"""int8 with a scale per vector: the kernel equals the plain version, alone and in a decode step."""

import pytest
import torch

from kvprune.cache.extents import ExtentTable
from kvprune.ops.decode import NewToken, Votes, decode
from kvprune.ops.form import AttentionForm
from kvprune.ops.hadamard import hadamard
from kvprune.ops.int8 import dequantise, quantise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e4])
def test_the_kernel_equals_the_plain_version(dtype, scale):
    x = (torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    x[3] = 0
    want, got = quantise(x, "reference"), quantise(x, "cpu")
    assert got[0].equal(want[0])
    assert got[1].equal(want[1])


def test_the_error_is_at_most_half_a_step():
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    numbers, scale = quantise(x)
    error = (dequantise(numbers, scale, torch.float32) - x).abs()
    # the scale is rounded to float16, so that the largest number may be cut by its rounding
    assert (error <= scale.float()[:, None] * 0.5 + x.abs() * 2**-10).all()
    assert numbers.abs().amax(1).ge(126).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e8])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_numbers_that_do_not_fit_become_nan(bad, backend):
    x = torch.ones(2, 8)
    x[1, 3] = bad
    numbers, scale = quantise(x, backend)
    back = dequantise(numbers, scale, torch.float32)
    assert back[0].isfinite().all()
    assert back[1].isnan().all()


@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_the_rotation_leaves_products_as_they_are(size):
    matrix = hadamard(size, torch.device("cpu"))
    x, y = torch.randn(2, 5, size, dtype=torch.float64)
    torch.testing.assert_close(
        (x @ matrix.double()) @ (y @ matrix.double()).T, x @ y.T, atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(matrix @ matrix, torch.eye(size), atol=1e-6, rtol=1e-6)
    assert hadamard(80, torch.device("cpu")) is None


def test_the_rotation_helps_keys_with_outliers():
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 50
    matrix = hadamard(64, torch.device("cpu"))
    plain = dequantise(*quantise(x), torch.float32) - x
    turned = dequantise(*quantise(x @ matrix), torch.float32) @ matrix - x
    others = [i for i in range(64) if i != 7]
    assert turned[:, others].std() < plain[:, others].std() / 3


@pytest.mark.parametrize("key_int", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize(("B", "H", "G", "D"), [(3, 2, 2, 16), (2, 1, 3, 80), (1, 3, 1, 64)])
def test_the_kernel_and_the_plain_version_decode_alike(B, H, G, D, rotate, key_int):
    options = {"rank": 8, "kv": "int8", "key_int": key_int, "rotate": rotate}
    tables = [ExtentTable(B, H, D, **options) for _ in range(2)]
    exact = ExtentTable(B, H, D, rank=8, key_int=key_int)
    random = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=random)

    form, seen = AttentionForm(D**-0.5), torch.zeros(B, dtype=torch.long)
    for _ in range(60):
        active = torch.rand(B, generator=random) > 0.2
        new = NewToken(randn(B, H * G, 1, D), randn(B, H, 1, D), randn(B, H, 1, D), seen, active)
        votes = Votes(randn(B, 8) / 8**0.5, randn(B, 8), 2.0)
        got = decode(tables[0], new, form, votes=votes, backend="cpu")
        want = decode(tables[1], new, form, votes=votes, backend="reference")
        near = decode(exact, new, form, votes=votes)
        assert got.dropped.equal(want.dropped)
        # a row that is not active gets its own value back, as the kernel knows it: rounded
        torch.testing.assert_close(got.output[active], want.output[active], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(got.output[active], near.output[active], atol=0.05, rtol=0.05)
        seen = seen + active
    # bit for bit the same bytes in both
    for b in range(B):
        for name, column in tables[0].row(b).items():
            assert column.equal(tables[1].row(b)[name]), name
    assert tables[0].nbytes < 0.5 * exact.nbytes


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_output_has_the_dtype_of_the_query(dtype, backend):
    table = ExtentTable(1, 2, 16, rank=0, dtype=dtype, kv="int8")
    heads = [torch.randn(1, H, 1, 16).to(dtype) for H in (4, 2, 2)]
    new = NewToken(*heads, torch.zeros(1, dtype=torch.long), None)
    assert decode(table, new, AttentionForm(0.25), backend=backend).output.dtype is dtype
