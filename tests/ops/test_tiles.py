"""The decode kernels' inner loops against NumPy, for every number of heads that share a key."""

import numpy as np
import pytest
import torch

from kvprune.ops.decode.cpu import array
from kvprune.ops.decode.kernels import add_values, dots, largest

# less than one vector, whole tiles, and what is left over of each
WIDTHS = [5, 8, 32, 80, 91]


def stored(S, D, dtype):
    random = torch.Generator().manual_seed(S * D)
    x = torch.randn(S, D, generator=random)
    return (x * 50).to(dtype) if dtype is torch.int8 else x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("G", [1, 2, 3, 4, 5, 7])
def test_dots_and_sums_of_values(G, dtype):
    S, start, stop = 23, 3, 21
    for D in WIDTHS:
        k = stored(S, D, dtype)
        query, p = (np.random.default_rng(D).normal(size=(G, n)).astype("f") for n in (D, S))
        logit, out = np.full((G, S), 7, "f"), np.full((G, D), 7, "f")
        dots(logit, query, array(k), start, stop)
        add_values(out, p, array(k), start, stop)
        part = k[start:stop].double().numpy()
        scale = abs(part).max()
        np.testing.assert_allclose(logit[:, start:stop], query @ part.T, atol=1e-5 * scale)
        np.testing.assert_allclose(out - 7, p[:, start:stop] @ part, atol=1e-5 * scale)
        # nothing else is written
        assert (logit[:, :start] == 7).all()
        assert (logit[:, stop:] == 7).all()


def test_the_largest_is_found_wherever_it_is():
    for n in range(1, 14):
        for top in range(n):
            p = -np.arange(1, n + 1, dtype="f")
            p[top] = 0.5
            assert largest(p) == 0.5
