"""What a method is: what it stores with each token, what it drops and when, what it protects.

A method is a frozen configuration and its rule in one class. Attention, cache and trainer ask it,
and never for its type. Importing a method does not import torch: `kvprune --help` reads its
options off these classes.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kvprune.errors import PruneError
from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvprune.methods.interaction import Ballot, Interaction
    from kvprune.ops.decode import Votes
    from kvprune.ops.decode.table import Table
    from kvprune.ops.form import AttentionForm
    from kvprune.ops.gate import Gate
    from kvprune.ops.timeline import Protection, Timeline


class Reading(NamedTuple):
    """A prompt, or a part of one, in one layer: T queries, and P cached keys before their own."""

    timeline: Timeline
    token: Tensor  # (B, P + T), the number of each key's token; -1 for a pad or a free slot
    query: Tensor  # (B, Hq, T, D)
    key: Tensor  # (B, H, P + T, D)
    form: AttentionForm
    ballot: Ballot | None  # q_int of the queries and k_int of all keys, if the layer has them
    columns: Mapping[str, Tensor]  # (B, P + T, ...), what the method stores with each token
    below: tuple[Tensor, Tensor] | None  # token numbers and drop steps of the layer below
    layer: int = 0  # its number among the pruned layers


class Step(NamedTuple):
    """One new token per row in one layer, before it attends."""

    table: Table  # what the layer holds
    now: Tensor  # (B,), the number of the new token
    votes: Votes | None  # what the new token brings to a vote; as it is, it drops nothing
    below: Tensor | None  # (B, S), tokens that the layer below dropped in this step; -1 for none
    layer: int = 0  # its number among the pruned layers


@dataclass(frozen=True)
class Method(ABC):
    """A method that drops nothing; each one overrides what it does differently."""

    method: ClassVar[str]  # its name in files and on the command line
    trainable: ClassVar[bool] = False  # whether a model can be fine-tuned with it
    learns: ClassVar[bool] = False  # whether it has weights of its own, and so a soft gate
    prunes: ClassVar[bool] = True  # False: every token sees all earlier ones
    watches: ClassVar[bool] = False  # judges by attention weights, so reads token by token
    cuts_prompts: ClassVar[bool] = False  # drops only when a prompt, or a part of one, is read
    evicts: ClassVar[bool] = False  # has tokens leave after a step, by `evict`
    reversible: ClassVar[bool] = True  # whether tokens can be taken back (assisted decoding)
    adjustable: ClassVar[tuple[str, ...]] = ()  # settings that need no new training

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        """What is stored with each token besides its key and value: name → shape, float32."""
        return {}

    @property
    def key_int_width(self) -> int:
        """Width of the interaction keys that a cache stores."""
        return 0

    @property
    def start_alpha(self) -> float:
        """α of the gate until another is set."""
        return math.inf

    @property
    def ties_layers(self) -> bool:
        """Whether a layer also drops what the layer below dropped."""
        return False

    def protection(self) -> Protection:
        """Which tokens cannot be voted out."""
        from kvprune.ops.timeline import Protection

        return Protection()

    def new_interaction(self, width: int, device: torch.device) -> Interaction | None:
        """Fresh weights for one layer whose attention reads vectors of this width."""
        return None

    def soft_gate(self, alpha: float) -> Gate:
        """The gate of training."""
        raise PruneError(f"{self.method} has no soft gate; leave pruned.hard at None or True")

    def start_advice(self, alpha: float) -> str:
        """What is wrong with starting training at this α; empty if nothing is."""
        return ""

    def new_columns(self, key: Tensor) -> dict[str, Tensor]:
        """The columns of tokens that come in with these keys (B, H, T, D)."""
        return {}

    def drop_steps(self, reading: Reading) -> Tensor:
        """When each key is dropped, as the index of the first query that no longer sees it.

        (B, P + T); T if it leaves after the last one, NEVER if it stays, a pad's its own index.
        """
        steps = reading.timeline.index.where(reading.timeline.visible_from == NEVER, NEVER)
        return steps

    def decode(self, step: Step) -> tuple[Votes | None, Tensor | None]:
        """Who leaves before a new token attends: by votes, and by a mask over the slots (B, S)."""
        return step.votes, None

    def evict(self, table: Table, weights: Tensor | None, now: Tensor) -> Tensor:
        """Bring every row back to its budget after a step.

        weights: (B, Hq, S), the step's attention, if the method watches it; now: (B,), the number
        of the new token. Returns the numbers of the tokens that left: (B, S), -1 for none.
        """
        raise NotImplementedError

    def held(self, context: int, kept: int) -> Tensor:
        """Numbers of tokens that a row may hold after `context` tokens, `kept` of them or so."""
        import torch

        return torch.arange(context - min(kept, context), context)

    @classmethod
    def with_budget(cls, kept: int, context: int) -> Method:
        """The method so that it holds about `kept` tokens after `context`."""
        raise PruneError(f"{cls.method} takes no budget; its size follows from training")

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.method, **asdict(self)}


def remove_one(table: Table, slot: Tensor, over: Tensor) -> Tensor:
    """Free one slot (B, 1) of each row that is over its budget (B,); see `Method.evict`."""
    token, valid = table.members()
    leaves = (valid & False).scatter_(1, slot, over[:, None])
    gone = token.where(leaves, -1)
    table.remove(leaves)
    return gone
