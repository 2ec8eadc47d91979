"""Is everything right here? The doctor's tests, and a small model on this device and on the CPU."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvprune
from kvprune.doctor.self_test import self_tests
from kvprune.evaluate.throughput.rigged import set_beta
from on_gpu.sizes import Sizes

# float32 sums in another order, through two layers and back
CLOSE = 1e-3


def problems(device: torch.device, sizes: Sizes) -> list[str]:
    """One line for each kernel or model that differs from plain torch; none if all is right."""
    failed = [test for test in self_tests(device) if not test.passed]
    found = [
        f"{test.operation} by {test.backend} in {test.dtype}: "
        + (test.problem or f"off by {test.error:.2g}, allowed {test.allowed:.2g}")
        for test in failed
    ]
    return found or [*_written(device), *_trained(device)]


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.1,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _pruned(device: torch.device) -> kvprune.Pruned:
    torch.manual_seed(1)
    pruned = kvprune.attach(_model(), kvprune.PruningConfig(rank=16, alpha=1.5))
    set_beta(pruned, 1.5)
    pruned.model.to(device)
    return pruned


def _written(device: torch.device) -> list[str]:
    """A padded batch that reads and writes: the same logits, and the same tokens held."""
    ids = torch.randint(3, 101, (3, 70), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    sides = []
    for place, backend in ((device, None), (torch.device("cpu"), "reference")):
        pruned = _pruned(place)
        pruned.model.eval()
        cache = kvprune.PrunedCache(pruned, backend=backend)
        own, logits = mask.to(place), []
        with torch.inference_mode():
            for step in range(8):
                new = ids[:, :40] if step == 0 else ids[:, 39 + step : 40 + step]
                seen = own[:, : 40 + step]
                out = pruned.model(
                    new.to(place), attention_mask=seen, past_key_values=cache,
                    position_ids=(seen.cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :],
                )  # fmt: skip
                logits.append(out.logits[:, -1].cpu())
        sides.append((torch.stack(logits), cache.kept.cpu()))
    (got, kept), (want, kept_too) = sides
    found = []
    if not torch.equal(kept, kept_too):
        found.append(f"a model holds {kept.tolist()} tokens, plain torch {kept_too.tolist()}")
    return found + _far("logits of a model that writes", got, want)


def _trained(device: torch.device) -> list[str]:
    """A training step: the loss and every gradient."""
    ids = torch.randint(101, (2, 70), generator=torch.Generator().manual_seed(3))
    sides = []
    for place in (device, torch.device("cpu")):
        pruned = _pruned(place)
        pruned.model.train()
        own = ids.to(place)
        (pruned.model(own, labels=own).loss + 0.3 * pruned.sparsity_loss()).backward()
        sides.append({name: p.grad.cpu() for name, p in pruned.model.named_parameters()})
    got, want = sides
    return [line for name in want for line in _far(f"gradient of {name}", got[name], want[name])]


def _far(what: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    gap = float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))
    return [] if gap <= CLOSE else [f"{what}: off by {gap:.2g} of the largest"]
