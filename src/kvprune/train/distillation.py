"""The teacher of a run: who it is, what it says of a batch, and how far the model is from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvprune.adapters.dense import as_base_model
from kvprune.adapters.save import describe_base
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned
from kvprune.train.distill import IGNORE, kl_to_teacher
from kvprune.train.head import frozen_head, hidden_kl, last_hidden
from kvprune.train.teacher_store import TeacherStore

Autocast = Callable[[], AbstractContextManager[Any]]


class Distillation:
    """KL to a teacher: a model of its own, or (None) the trained one with pruning and LoRA off.

    `by_states`: compare their last hidden states where the output layer is frozen (head.py); it
    needs the KL as the only language loss. `cache`: folder of the teacher's (teacher_store.py).
    """

    def __init__(
        self,
        pruned: Pruned,
        teacher: PreTrainedModel | None,
        autocast: Autocast,
        cache: str | None = None,
        *,
        by_states: bool = False,
    ):
        self.pruned, self.teacher, self.autocast = pruned, teacher, autocast
        # the trained model's output layer is that of the teacher only if they are one model
        self.head = frozen_head(pruned.model) if by_states and teacher is None else None
        self.store: TeacherStore | None = None
        if cache is not None:
            if self.head is None:
                raise PruneError(
                    f"teacher_cache={cache!r} needs distill=1, tune='lora' or 'interaction', and a "
                    f"model whose logits are its output layer of the last hidden states"
                )
            name = str(describe_base(pruned.model)["name"])
            self.store = TeacherStore(cache, name, self.head.in_features)

    @torch.no_grad()
    def teacher_logits(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        inputs = _without_labels(inputs)
        if self.teacher is None:
            with as_base_model(self.pruned):
                logits: Tensor = model(**inputs)["logits"]
        else:
            with self.autocast():
                logits = self.teacher(**inputs).logits
        return logits

    def kl(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Σ KL(teacher ‖ student) over the labels, without a next-token loss beside it."""
        labels = inputs["labels"]
        if self.head is None:
            teacher = self.teacher_logits(model, inputs)
            return kl_to_teacher(model(**_without_labels(inputs))["logits"], teacher, labels)
        teacher = self._teacher_hidden(model, inputs)
        student = last_hidden(model, _without_labels(inputs))
        predicts = F.pad(labels[:, 1:] != IGNORE, (0, 1)).to(student.device)
        with self.autocast():
            return hidden_kl(student[predicts], teacher.to(student.device)[predicts], self.head)

    @torch.no_grad()
    def _teacher_hidden(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """(B, T, D); rows with padding are not stored: their tokens do not say where it is."""
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        store = self.store if mask is None or bool(mask.all()) else None
        known = [store.get(row) for row in ids] if store else []
        if store and all(row is not None for row in known):
            return torch.stack([row for row in known if row is not None])
        with as_base_model(self.pruned):
            hidden = last_hidden(model, _without_labels(inputs))
        if store:
            for row, states, seen in zip(ids, hidden, known, strict=True):
                if seen is None:
                    store.put(row, states)
        return hidden


def _without_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "labels"}
