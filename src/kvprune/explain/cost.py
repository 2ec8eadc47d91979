"""What pruning cost: the tokens whose prediction suffered, and the tokens that they lacked."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

# a token and a layer, by its row in `drop_step`; None: in every layer
Place: TypeAlias = tuple[int, int | None]


class Return(NamedTuple):
    """A dropped token that is brought back, and the loss of the token that missed it."""

    token: int
    layer: int | None  # its row in `drop_step`; None: in every layer
    loss: float


class Miss(NamedTuple):
    """A token whose prediction suffered from pruning."""

    token: int
    loss: float  # -log p, as pruned
    dense_loss: float
    open_loss: float  # with every token brought back
    returns: tuple[Return, ...] = ()  # those that help most, best first

    @property
    def cost(self) -> float:
        return self.loss - self.dense_loss
