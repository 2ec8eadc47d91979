"""The kernel of drop steps against the plain version, on scores that are no ties."""

import math

import pytest
import torch

from helpers import random, real_tokens
from kvprune.ops.keep.drop import DROP_STEPS, cpu, drop_steps
from kvprune.ops.timeline import NEVER, Protection, make_timeline

BACKENDS = DROP_STEPS.available(exclude="reference")
# float32 sums in another order may put a score this close to the threshold on its other side
TIE = 1e-5


def ballot(B, T, P=0, R=5, threshold=0.0, beta=1.5):
    """Votes without a tie: queries that have one vote on nothing, their scores are β alone."""
    q, k = random(B, T, R, seed=1) / math.sqrt(R), random(B, P + T, R, seed=2)
    q, k, beta = q.float(), k.float(), torch.tensor(beta)
    scores = q.double() @ k.double().transpose(1, 2) + beta.double()
    tied = ((scores - threshold).abs() < TIE).any(-1, keepdim=True)
    return q.masked_fill(tied, 0.0), k, beta


def times(B, T, padding="none", protect=(0, 0), P=0):
    """A timeline; with P keys of a cache before it, in any order and some of their slots free."""
    real, rules, device = real_tokens(B, T, padding), Protection(*protect), torch.device("cpu")
    timeline = make_timeline(real, (B, T), device, rules, start=2 * P)
    if not P:
        return timeline
    generator = torch.Generator().manual_seed(3)
    token = torch.stack([torch.randperm(2 * P, generator=generator)[:P] for _ in range(B)])
    valid = torch.rand(B, P, generator=generator) < 0.8
    return timeline.after(token, valid, rules)


def check(backend, votes, timeline, threshold=0.0):
    want = drop_steps(*votes, timeline, threshold, block=8, backend="reference")
    got = drop_steps(*votes, timeline, threshold, backend=backend)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    return want


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("protect", [(0, 0), (1, 2), (4, 9)])
@pytest.mark.parametrize("P", [0, 1, 21])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 2), (3, 33), (2, 130)])
def test_matches_reference(backend, padding, protect, P, B, T):
    steps = check(backend, ballot(B, T, P), times(B, T, padding, protect, P))
    if T > 30:
        dropped = (steps > torch.arange(-P, T)) & (steps < NEVER)
        assert 0 < int(dropped.sum()) < dropped.numel(), "all or nothing was dropped"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threshold", [-math.inf, -0.3, 0.7, math.inf])
@pytest.mark.parametrize("R", [1, 7, 8, 32])
def test_threshold_and_rank(backend, threshold, R):
    steps = check(backend, ballot(2, 40, R=R, threshold=threshold), times(2, 40), threshold)
    if math.isinf(threshold):
        soon = torch.arange(1, 41).where(torch.arange(40) < 39, NEVER)
        assert torch.equal(steps[0], soon if threshold > 0 else torch.full((40,), NEVER))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("beta", [1.5, 9.0])
@pytest.mark.parametrize("more", [-1, 0, 1, 520])
def test_several_stripes_of_keys(backend, beta, more):
    """With β = 9 hardly a key is dropped: stripes are full at the end."""
    P, T = 300, cpu.STRIPE - 300 + more
    check(backend, ballot(2, T, P, beta=beta), times(2, T, "left", P=P))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tie_is_a_vote_to_drop(backend):
    zeros, beta = torch.zeros(1, 3, 2), torch.tensor(0.25)
    for threshold, want in ((0.25, [1, 2, NEVER]), (0.2499, [NEVER] * 3)):
        got = drop_steps(zeros, zeros, beta, times(1, 3), threshold, backend=backend)
        assert got.tolist() == [want]


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_and_gradients_do_no_harm(backend):
    q, k, beta = ballot(2, 40)
    want = drop_steps(q, k, beta, times(2, 40), backend="reference")
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k))
    got = drop_steps(q, k, beta.reshape(1).requires_grad_(), times(2, 40), backend=backend)
    assert torch.equal(got, want)


def test_other_dtypes_take_the_plain_version():
    assert DROP_STEPS.best_backend(torch.empty(0, dtype=torch.float64)) == "reference"
    assert DROP_STEPS.best_backend(torch.empty(0)) == "cpu"
