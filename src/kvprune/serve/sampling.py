"""The next token of each row, from its logits; every row has random numbers of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvprune.serve.request import Sampling, Token

# tokens among which the next one is looked for first
LIKELY = 256


class Sampler:
    """Chooses the tokens of one row.

    The same seed gives the same tokens, whoever is beside it. `prompt`: tokens that a repetition
    penalty counts too; presence and frequency are those of the answer.
    """

    def __init__(self, rules: Sampling, prompt: Iterable[int] = (), number: int = 0):
        self.rules = rules
        self._random = torch.Generator()
        if rules.seed is None:
            self._random.seed()
        else:
            # the choices of one request differ
            self._random.manual_seed((rules.seed + number) % 2**63)
        self._prompt = set(prompt) if rules.repetition_penalty != 1 else set[int]()
        self._counts: Counter[int] = Counter()

    @property
    def plain(self) -> bool:
        """Whether the largest logit wins, as it is."""
        rules = self.rules
        return (
            rules.temperature == 0
            and not rules.logit_bias
            and rules.presence_penalty == rules.frequency_penalty == 0
            and rules.repetition_penalty == 1
        )

    def choose(self, logits: Tensor, banned: Iterable[int] = ()) -> int:
        """A token, by logits (V,) in float32, which are changed; never a banned one."""
        rules = self.rules
        self._penalise(logits)
        for token, bias in rules.logit_bias.items():
            logits[token] += bias
        for token in banned:
            logits[token] = -torch.inf
        if rules.temperature == 0:
            return int(logits.argmax())
        return self._draw(logits / rules.temperature)

    def note(self, token: int) -> None:
        """The token is part of the answer now."""
        self._counts[token] += 1

    def _draw(self, logits: Tensor) -> int:
        """One of those that top_k, min_p and top_p leave, in this order."""
        rules, V = self.rules, len(logits)
        most = min(rules.top_k or V, V)
        if most == V and not rules.min_p and rules.top_p >= 1:
            return self._pick(logits.softmax(-1))
        # few are likely: the others are sorted only if they must be
        size = min(most, LIKELY)
        while True:
            best = logits.topk(size)
            share = (best.values - logits.logsumexp(-1)).exp()
            stays = share >= rules.min_p * share[0]
            all_here = size == most or not stays[-1]
            total = share[stays].sum() if all_here else 1.0
            # the one that passes the mark still belongs
            inside = stays & (share.cumsum(-1) - share < rules.top_p * total)
            if all_here or (most == V and not rules.min_p and not inside[-1]):
                break
            size = most
        return int(best.indices[self._pick(share * inside)])

    def _pick(self, share: Tensor) -> int:
        """A number with these chances; `multinomial` would draw as many as there are chances."""
        sums = share.double().cumsum(-1)
        mark = torch.rand((), generator=self._random, dtype=torch.float64) * sums[-1]
        # the first whose sum is above the mark: never one without a chance
        found = torch.searchsorted(sums, mark.clamp(max=sums[-1] * (1 - 1e-15)), right=True)
        return int(found)

    def _penalise(self, logits: Tensor) -> None:
        rules = self.rules
        if rules.repetition_penalty != 1 and (seen := self._prompt | self._counts.keys()):
            index = torch.tensor(sorted(seen))
            own = logits[index]
            factor = rules.repetition_penalty
            logits[index] = torch.where(own > 0, own / factor, own * factor)
        if self._counts and (rules.presence_penalty or rules.frequency_penalty):
            index = torch.tensor(list(self._counts))
            times = torch.tensor(list(self._counts.values()), dtype=logits.dtype)
            logits[index] -= rules.presence_penalty + rules.frequency_penalty * times


def log_probabilities(logits: Tensor, tokens: Sequence[int], top: int) -> list[Token]:
    """The tokens with their log-probabilities and those of the `top` most likely ones.

    logits: (K, V), one row per token. All come from the same numbers, so that the most likely token
    has exactly the probability that it has among the alternatives.
    """
    logs = logits.float().log_softmax(-1)
    own = logs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    best = logs.topk(min(top, logs.shape[1]), -1)
    return [
        Token(token, log, tuple(zip(ids, values, strict=True)))
        for token, log, ids, values in zip(
            tokens, own, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
