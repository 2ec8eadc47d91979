"""What several tests need."""

import torch
from torch import Tensor


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def real_tokens(B: int, T: int, padding: str) -> Tensor | None:
    """Which tokens are real: "none" padded, or each row but the first on the "left" or "right"."""
    if padding == "none":
        return None
    real = torch.ones(B, T, dtype=torch.bool)
    for b in range(1, B):
        pads = min(3 * b, T - 1)
        if padding == "left":
            real[b, :pads] = False
        else:
            real[b, T - pads :] = False
    return real


def uneven_gates(pruned, seed: int = 0, spread: float = 1.5) -> None:
    """Random interactions that drop much in some layers and rows, little in others."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for i, interaction in enumerate(pruned.interactions):
            for weight in (interaction.query.weight, interaction.key.weight):
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread / 8)
            interaction.beta.fill_(2.0 + 1.5 * (i % 2))


def random_ids(B: int, T: int, seed: int = 0, vocab: int = 101) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (B, T), generator=generator)
