"""The learned weights: how strongly each token wants each earlier token kept."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Ballot(NamedTuple):
    """What the tokens of one layer bring to a vote: a score is q_int·k_int + β."""

    q_int: Tensor  # (B, T, R), divided by √r
    k_int: Tensor  # (B, T, R)
    beta: Tensor  # ()


class Interaction(nn.Module):
    """Interaction queries and keys of one layer, and its bias β.

    Paper:  s[k, j] = q_int[k]·k_int[j] / √r + β,  q_int = X W_Qint,  k_int = X W_Kint.
    In float32 at least, whatever the model's dtype or autocast: bfloat16 scores put a 4 % error
    on a product of 500 gates.
    """

    def __init__(self, width: int, rank: int, beta: float, device: torch.device | None = None):
        super().__init__()
        self.query = nn.Linear(width, rank, bias=False, device=device, dtype=torch.float32)
        self.key = nn.Linear(width, rank, bias=False, device=device, dtype=torch.float32)
        self.beta = nn.Parameter(torch.tensor(beta, device=device, dtype=torch.float32))
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=1 / math.sqrt(width))

    @property
    def rank(self) -> int:
        return self.query.out_features

    def forward(self, hidden: Tensor) -> Ballot:
        if torch.is_autocast_enabled(hidden.device.type):
            with torch.autocast(hidden.device.type, enabled=False):
                return self.forward(hidden)
        query, key = self.query.weight, self.key.weight  # (R, width)
        dtype = torch.promote_types(query.dtype, torch.float32)
        hidden = hidden.to(dtype)
        q_int = F.linear(hidden, query.to(dtype)) / math.sqrt(len(query))
        return Ballot(q_int, F.linear(hidden, key.to(dtype)), self.beta.to(dtype).reshape(()))

    def beta_as_vector(self) -> None:
        """Make β a tensor of one element: FSDP cannot shard a scalar."""
        self.beta = nn.Parameter(self.beta.detach().reshape(1), self.beta.requires_grad)
