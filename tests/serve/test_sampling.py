"""Sampling against the plain definition of each rule."""

import pytest
import torch

from kvprune.serve.request import Sampling
from kvprune.serve.sampling import Sampler, log_probabilities

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, 0.5])


def shares(times=4000, seed=0, **rules):
    sampler = Sampler(Sampling(seed=seed, **rules))
    drawn = torch.tensor([sampler.choose(LOGITS.clone()) for _ in range(times)])
    return drawn.bincount(minlength=6) / times


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2}, [0, 4]),
        ({"top_p": 0.7}, [0, 4]),
        ({"top_p": 0.01}, [4]),
        ({"min_p": 0.3}, [0, 4]),
        ({"top_k": 3, "top_p": 0.99}, [0, 1, 4]),
    ],
)
def test_the_distribution(rules, allowed):
    logits = LOGITS / rules.get("temperature", 1.0)
    want = torch.full((6,), -torch.inf)
    want[allowed] = logits[allowed]
    torch.testing.assert_close(shares(**rules), want.softmax(-1), atol=0.03, rtol=0)


def plainly(logits, top_k, min_p, top_p):
    """What is left, by the definitions: one filter after the other, over all tokens."""
    share = logits.softmax(-1)
    order = share.argsort(descending=True).tolist()
    if top_k:
        order = order[:top_k]
    order = [token for token in order if share[token] >= min_p * share[order[0]]]
    total, left, sum_before = sum(share[token] for token in order), set(), 0.0
    for token in order:
        if sum_before < top_p * total:
            left.add(token)
        sum_before += share[token]
    return left


@pytest.mark.parametrize("spread", [0.05, 2.0, 6.0])
@pytest.mark.parametrize(
    ("top_k", "min_p", "top_p"),
    [(0, 0, 0.9), (0, 0.05, 1), (7, 0, 1), (300, 0, 0.8), (400, 0.02, 0.95), (0, 0.3, 0.5)],
)
def test_filters_over_many_tokens(monkeypatch, spread, top_k, min_p, top_p):
    logits = spread * torch.randn(500, generator=torch.Generator().manual_seed(1))
    taken = []
    sampler = Sampler(Sampling(top_k=top_k, min_p=min_p, top_p=top_p))
    monkeypatch.setattr(sampler, "_pick", lambda x: taken.append(x) or 0)
    assert sampler.choose(logits.clone()) == int(logits.argmax())
    assert int((taken[0] > 0).sum()) == len(plainly(logits, top_k, min_p, top_p))


def test_greedy_bias_and_bans():
    assert Sampler(Sampling(temperature=0)).choose(LOGITS.clone()) == 4
    assert Sampler(Sampling(temperature=0)).choose(LOGITS.clone(), {4}) == 0
    biased = Sampler(Sampling(temperature=0, logit_bias={3: 100.0}))
    assert biased.choose(LOGITS.clone()) == 3
    assert not biased.plain
    assert Sampler(Sampling(temperature=0)).plain


def test_penalties():
    sampler = Sampler(Sampling(temperature=0, presence_penalty=0.5, frequency_penalty=0.75))
    for _ in range(2):
        sampler.note(4)
    logits = LOGITS.clone()
    sampler.choose(logits)
    assert logits[4] == 3.0 - 0.5 - 2 * 0.75
    repeated = Sampler(Sampling(temperature=0, repetition_penalty=2.0), prompt=[3, 4])
    logits = LOGITS.clone()
    assert repeated.choose(logits) == 0
    assert logits.tolist() == [2.0, 1.0, 0.0, -2.0, 1.5, 0.5]


def test_seeds():
    def draw(seed, number=0):
        sampler = Sampler(Sampling(seed=seed), number=number)
        return [sampler.choose(LOGITS.clone()) for _ in range(20)]

    assert draw(1) == draw(1)
    assert len({tuple(x) for x in (draw(1), draw(2), draw(5, 3), draw(None))}) == 4


def test_log_probabilities_come_from_one_tensor():
    (first, second) = log_probabilities(torch.stack([LOGITS, -LOGITS]), [4, 0], 3)
    assert first.top[0] == (4, first.logprob)
    assert [token for token, _ in first.top] == [4, 0, 1]
    assert second.logprob == pytest.approx(float((-LOGITS).log_softmax(-1)[0]))
    assert second.logprob < second.top[-1][1]
