"""A pruned model for lm-eval: its Hugging Face model that also measures sparsity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from kvprune.adapters.load import Loaded, load_with_tokenizer
from kvprune.evaluate.reader import dropped_by, last_drop_step
from kvprune.integration.unwrap import unwrap
from kvprune.utils.processes import ALONE, Group

Request = tuple[tuple[str, str], list[int], list[int]]
Scored = tuple[tuple[float, bool], float]  # log-likelihood, greedy or not; sparsity


class PrunedLM(HFLM):  # type: ignore[misc, unused-ignore]
    """`--model kvprune --model_args pretrained=M,adapter=A`; further arguments are HFLM's.

    Sparsity of a request: of its scored positions, the mean share of earlier tokens that the
    position no longer sees, over layers. The one that predicts the first token of the continuation
    is the last of the context. Padding is on the right, after all that counts: causal attention
    and votes never reach it. Processes of a `group` share the requests.
    """

    def __init__(
        self,
        pretrained: str | Loaded,
        adapter: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        group: Group = ALONE,
        **options: Any,
    ) -> None:
        if isinstance(pretrained, str):
            pretrained = load_with_tokenizer(pretrained, adapter, dtype, device)
        self.loaded, self.group = pretrained, group
        model, self.pruned = unwrap(pretrained.model)
        # one per request scored so far, in order
        self.sparsities: list[float] = []
        self._read: tuple[Tensor, Tensor] | None = None  # tokens and shares of the batch: (B, T)
        self._row = 0
        self._shares: dict[tuple[int, ...], Tensor] = {}  # by the tokens that were read: (T,)
        super().__init__(model, tokenizer=pretrained.tokenizer, **options)

    @property
    def sparsity(self) -> float | None:
        """Mean over requests; None before there are any."""
        return sum(self.sparsities) / len(self.sparsities) if self.sparsities else None

    def _model_call(
        self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        if self.pruned is None:
            plain: Tensor = super()._model_call(inps, attn_mask, labels)
            self._note(inps, torch.zeros(inps.shape))
            return plain
        half = self.mixed_precision_dtype
        with (
            torch.no_grad(),
            torch.autocast(self.device.type, dtype=half, enabled=half is not None),
            self.pruned.evaluating(),
        ):
            logits: Tensor = self.model(input_ids=inps, use_cache=False).logits
        earlier = torch.arange(inps.shape[1]).clamp(min=1)
        dropped = dropped_by(last_drop_step(self.pruned))  # (L, B, T)
        self._note(inps, dropped.float().mean(0) / earlier)
        return logits

    def _note(self, inps: Tensor, shares: Tensor) -> None:
        self._read, self._row = (inps.cpu(), shares), 0

    def _select_cont_toks(
        self, logits: Tensor, contlen: int | None = None, inplen: int | None = None
    ) -> Tensor:
        # called once per row, in order; only here it is known where the padding begins
        assert self._read is not None
        tokens, shares = (part[self._row, :inplen] for part in self._read)
        self._shares[tuple(tokens.tolist())] = shares
        self._row += 1
        picked: Tensor = super()._select_cont_toks(logits, contlen, inplen)
        return picked

    def _loglikelihood_tokens(
        self, requests: list[Request], *args: Any, **options: Any
    ) -> list[tuple[float, bool]]:
        if self.group.size == 1:
            scored = self._score(requests, *args, **options)
        else:
            scored = self._share(requests, **options)
        self.sparsities += [sparsity for _, sparsity in scored]
        return [likelihood for likelihood, _ in scored]

    def _score(self, requests: list[Request], *args: Any, **options: Any) -> list[Scored]:
        scored: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, *args, **options)
        sparsities = []
        for _, context, continuation in requests:
            # requests that differ only in their last token were read once
            read = (context + continuation)[-(self.max_length + 1) :][:-1]
            sparsities.append(float(self._shares[tuple(read)][-len(continuation) :].mean()))
        self._shares = {}
        return list(zip(scored, sparsities, strict=True))

    def _share(self, requests: list[Request], disable_tqdm: bool = False, **_: Any) -> list[Scored]:
        """All requests, by batches that the processes of the group share."""
        parts = batches(requests, int(self.batch_size))
        answers = self.group.map(
            parts,
            lambda part: self._score([requests[index] for index in part], disable_tqdm=True),
        )
        scored: dict[int, Scored] = {}
        hidden = disable_tqdm or not self.group.is_main
        with tqdm(total=len(requests), unit=" requests", disable=hidden or None) as bar:
            for part, answer in zip(parts, answers, strict=True):
                scored.update(zip(part, answer, strict=True))
                bar.update(len(part))
        return [scored[index] for index in range(len(requests))]

    def get_model_info(self) -> dict[str, Any]:
        """For lm-eval's results; without querying the hub."""
        return {
            "model": self.loaded.name,
            "adapter": self.loaded.adapter,
            "model_num_parameters": self.loaded.host.num_parameters(),
            "model_dtype": str(self.loaded.host.dtype),
            "sparsity": self.sparsity,
        }


def batches(requests: Sequence[Request], size: int) -> list[list[int]]:
    """The requests, by number, of each batch that lm-eval would form of them in one process.

    It reads requests that differ only in their last token once, and the longest ones first. A
    batch formed in the same way gives the same numbers, to the last bit.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (_, context, continuation) in enumerate(requests):
        groups.setdefault(tuple((context + continuation)[:-1]), []).append(number)

    def order(group: list[int]) -> tuple[int, list[int]]:
        _, context, continuation = max((requests[n] for n in group), key=lambda r: len(r[2]))
        return -len(context + continuation), context + continuation

    ordered = sorted(groups.values(), key=order)
    return [
        [number for group in ordered[start : start + size] for number in group]
        for start in range(0, len(ordered), size)
    ]
