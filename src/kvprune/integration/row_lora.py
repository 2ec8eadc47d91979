"""LoRA beside a linear layer's weights, for models that share them: W x + B A x.

Models over the same weights can be run in one pass: the rows of each get its own LoRA.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvprune.errors import PruneError
from kvprune.integration.flat import FlatPass

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvprune.integration.handle import Pruned

# parameters of a linear layer: (R, in), and (out, R) times the scale
DOWN, UP = "lora_down", "lora_up"
# for so many rows two products over all models' factors are faster than two for each model
STACKED_ROWS = 64


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Another model with the same weights: not copies, the tensors themselves."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def put_beside(linear: nn.Linear, down: Tensor, up: Tensor) -> None:
    """Give a linear layer a LoRA that its weights know nothing of; `up` is scaled already."""
    for name, factor in ((DOWN, down), (UP, up)):
        own = factor.to(linear.weight.device, linear.weight.dtype).contiguous()
        linear.register_parameter(name, nn.Parameter(own, requires_grad=False))
    _row_lora(linear).members[None] = linear


def run_together(models: Sequence[Pruned]) -> None:
    """From now on a flat pass of the first model may have parts of all of them."""
    host, *others = models
    linears = _linears(host)
    for pruned in others:
        _check_twins(host, pruned)
        for name, linear in _linears(pruned).items():
            if DOWN in linear._parameters:
                _row_lora(linears[name]).members[pruned] = linear
    for linear in linears.values():
        if isinstance(row_lora := vars(linear).get("forward"), RowLora):
            row_lora.host = host
            if None in row_lora.members:
                row_lora.members[host] = linear


class RowLora:
    """The forward of a linear layer: its own product, and for each model's rows that model's LoRA.

    Outside of a flat pass all rows are the layer's own model's.
    """

    def __init__(self, linear: nn.Linear):
        self.name = f"{type(linear).__name__}({linear.in_features}, {linear.out_features})"
        self.plain = linear.forward
        self.host: Pruned | None = None
        self.members: dict[Pruned | None, nn.Linear] = {}  # None: the layer itself
        self.stack: _Stack | None = None

    def __call__(self, x: Tensor) -> Tensor:
        out = self.plain(x)
        rows, sums = x.flatten(0, -2), out.view(-1, out.shape[-1])
        run = None if self.host is None else self.host._hooks.latest
        if not isinstance(run, FlatPass):
            _add(self.members.get(None), rows, sums)
        elif len(rows) != run.length:
            raise PruneError(
                f"a {self.name} reads {len(rows)} of {run.length} tokens, so the rows of several "
                f"adapters cannot be told apart there; serve each adapter by itself"
            )
        elif len(rows) <= STACKED_ROWS and len(run.groups) > 1:
            self.stack = self.stack or _Stack(self.members)
            self.stack.add(run, rows, sums)
        else:
            for at, pruned in run.groups:
                _add(self.members.get(pruned), rows[at], sums[at])
        return out


class _Stack:
    """The factors of all models below each other: two products for few rows, however many models.

    Each row keeps its own model's part of A x. The other parts are zeros, which change no sum.
    """

    def __init__(self, members: Mapping[Pruned | None, nn.Linear]):
        own = {pruned: linear._parameters for pruned, linear in members.items() if pruned}
        downs: list[Any] = [factors[DOWN] for factors in own.values()]
        ups: list[Any] = [factors[UP] for factors in own.values()]
        self.down, self.up = torch.cat(downs).t().contiguous(), torch.cat(ups, 1).t().contiguous()
        self.ranks = tuple((pruned, len(down)) for pruned, down in zip(own, downs, strict=True))

    def add(self, run: FlatPass, rows: Tensor, sums: Tensor) -> None:
        others = run.notes.get(self.ranks)
        if others is None:
            others = run.notes[self.ranks] = self._others(run, rows.device)
        sums.addmm_(torch.mm(rows, self.down).masked_fill_(others, 0), self.up)

    def _others(self, run: FlatPass, device: torch.device) -> Tensor:
        """Which parts are of other models than the row's: (N, ΣR)."""
        models = {pruned: number for number, (_, pruned) in enumerate(run.groups)}
        of_row = torch.tensor(
            [models[p] for at, p in run.groups for _ in range(at.stop - at.start)]
        )
        of_part = torch.tensor([models.get(p, -1) for p, rank in self.ranks for _ in range(rank)])
        return (of_row[:, None] != of_part).to(device)


def _add(linear: nn.Linear | None, rows: Tensor, sums: Tensor) -> None:
    """sums += (rows Aᵀ) Bᵀ, in place."""
    if linear is not None:
        own: Any = linear._parameters
        sums.addmm_(torch.mm(rows, own[DOWN].t()), own[UP].t())


def _row_lora(linear: nn.Linear) -> RowLora:
    forward = vars(linear).get("forward")
    if not isinstance(forward, RowLora):
        forward = RowLora(linear)
        linear.forward = forward  # type: ignore[assignment,method-assign]
    return forward


def _linears(pruned: Pruned) -> dict[str, nn.Linear]:
    named = pruned.model.named_modules()
    return {name: module for name, module in named if isinstance(module, nn.Linear)}


def _check_twins(host: Pruned, other: Pruned) -> None:
    own, theirs = (dict(pruned.model.named_parameters()) for pruned in (host, other))
    shared = [name for name in own if name in theirs and own[name] is theirs[name]]
    lora = {f"{name}.{factor}" for name in _linears(host) for factor in (DOWN, UP)}
    votes = {
        f"{layer.name}.interaction.{name}"
        for layer in (*host.layers, *other.layers)
        if layer.interaction is not None
        for name, _ in layer.interaction.named_parameters()
    }
    if (own.keys() | theirs.keys()) - set(shared) - lora - votes:
        raise PruneError(
            "the models do not share their weights, so they cannot be run together; load them "
            "with kvprune.adapters.strengths.load_strengths"
        )
