"""A model that reads prompts into its cache and then writes: what a recall task needs of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.evaluate.reader import Reader
from kvprune.integration.handle import Pruned


@dataclass(frozen=True)
class Written:
    """What was written after each prompt, and how surprised the model is by the right answer."""

    tokens: list[list[int]]  # greedy, up to the end of the text
    log_p: list[float]  # of a token of the right answer, mean
    kept: list[float]  # tokens in a layer after the prompt, mean over layers


class Writes(Protocol):
    """Anything that continues prompts of one length."""

    def write(self, ids: Tensor, most: int, right: Sequence[Sequence[int]]) -> Written: ...


class Writer:
    """A model that writes what it holds most likely; a pruned one through its own cache."""

    def __init__(self, model: PreTrainedModel | Pruned, gates_open: bool = False, end: Any = None):
        self.reader = Reader(model, gates_open)
        ends = end if isinstance(end, list | tuple) else [end]
        self.ends = {token for token in ends if token is not None}

    @torch.no_grad()
    def write(self, ids: Tensor, most: int, right: Sequence[Sequence[int]]) -> Written:
        """Read ids (B, T) at once; score the right answers, then write up to `most` tokens."""
        with self.reader.mode():
            cache = self.reader.new_cache()
            last = self._step(cache, ids, keep=1)[:, -1]  # (B, V)
            kept = self._kept(cache, ids)
            log_p = self._log_p(copy.deepcopy(cache), last, right)
            written, token = [], last.argmax(-1)
            for _ in range(most):
                written.append(token)
                token = self._step(cache, token[:, None])[:, -1].argmax(-1)
        rows = torch.stack(written, 1).tolist()
        return Written([self._until_end(row) for row in rows], log_p, kept)

    def _step(self, cache: Any, ids: Tensor, keep: int = 0) -> Tensor:
        model = self.reader.model
        options = {"logits_to_keep": keep} if keep and self.reader.can_skip else {}
        out: Any = model(
            input_ids=ids.to(model.device), past_key_values=cache, use_cache=True, **options
        )
        logits: Tensor = out.logits
        return logits.float()

    def _log_p(self, cache: Any, last: Tensor, right: Sequence[Sequence[int]]) -> list[float]:
        longest = max(map(len, right))
        # padded on the right, which the tokens before do not see
        ids = torch.tensor([[*row, *[row[0]] * (longest - len(row))] for row in right])
        logits = [last[:, None]]
        if longest > 1:
            logits.append(self._step(cache, ids[:, :-1]))
        log_p = torch.cat(logits, 1).log_softmax(-1).cpu().gather(-1, ids[..., None])[..., 0]
        return [float(row[: len(own)].mean()) for row, own in zip(log_p, right, strict=True)]

    @staticmethod
    def _kept(cache: Any, ids: Tensor) -> list[float]:
        if not isinstance(cache, PrunedCache):
            return [float(ids.shape[1])] * len(ids)
        kept: list[float] = cache.kept.float().mean(0).tolist()
        return kept

    def _until_end(self, row: list[int]) -> list[int]:
        stop = next((place for place, token in enumerate(row) if token in self.ends), len(row))
        return row[:stop]
