"""A pruned model for lm-eval: its Hugging Face model that also measures sparsity."""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from kvprune.adapters.load import Loaded, load_with_tokenizer
from kvprune.evaluate.reader import dropped_by, last_drop_step
from kvprune.integration.unwrap import unwrap

Request = tuple[tuple[str, str], list[int], list[int]]


class PrunedLM(HFLM):  # type: ignore[misc, unused-ignore]
    """`--model kvprune --model_args pretrained=M,adapter=A`; further arguments are HFLM's.

    Sparsity of a request: of its scored positions, the mean share of earlier tokens that the
    position no longer sees, over layers. The one that predicts the first token of the continuation
    is the last of the context. Padding is on the right, after all that counts: causal attention
    and votes never reach it.
    """

    def __init__(
        self,
        pretrained: str | Loaded,
        adapter: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        **options: Any,
    ) -> None:
        if isinstance(pretrained, str):
            pretrained = load_with_tokenizer(pretrained, adapter, dtype, device)
        self.loaded = pretrained
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
        scored: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, *args, **options)
        for _, context, continuation in requests:
            # requests that differ only in their last token were read once
            read = (context + continuation)[-(self.max_length + 1) :][:-1]
            self.sparsities.append(float(self._shares[tuple(read)][-len(continuation) :].mean()))
        self._shares = {}
        return scored

    def get_model_info(self) -> dict[str, Any]:
        """For lm-eval's results; without querying the hub."""
        return {
            "model": self.loaded.name,
            "adapter": self.loaded.adapter,
            "model_num_parameters": self.loaded.host.num_parameters(),
            "model_dtype": str(self.loaded.host.dtype),
            "sparsity": self.sparsity,
        }
