"""A whole model's decode step: ours against transformers' caches, eager and compiled."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvprune
from kvprune.evaluate.throughput.decoding import dense_cache, filled_cache, stepper, twin
from kvprune.evaluate.throughput.rigged import steady_votes
from on_gpu.race import WARM_UP, Contestant, Row, race
from on_gpu.sizes import Sizes

STEPS = 4


def step(device: torch.device, sizes: Sizes) -> list[Row]:
    """Four tokens for each row; every row and layer of ours holds what is left after pruning."""
    config = sizes.model.config()
    torch.manual_seed(0)
    with device:
        dense = AutoModelForCausalLM.from_config(config, dtype=sizes.dtype).eval()
    rows = []
    for batch in sizes.rows:
        for context in sizes.contexts:
            case = f"{batch} × {context:,}"
            try:
                calls = _contestants(dense, sizes, batch, context)
                rows += race(device, sizes.rounds, "model", case, calls)
            except torch.OutOfMemoryError:
                pass
            calls = {}
    return rows


def _contestants(dense, sizes: Sizes, batch: int, context: int) -> dict[str, Contestant]:
    device, room = dense.device, STEPS * (sizes.rounds + WARM_UP + 3)
    kept = round((1 - sizes.sparsity) * context)
    ids = torch.randint(sizes.model.vocabulary, (1, 64), device=device)
    calls = {}
    for name in ("kvprune", "kvprune, compiled"):
        model = twin(dense)
        pruned = kvprune.attach(model, kvprune.PruningConfig(rank=sizes.rank))
        steady_votes(pruned, ids, kept)
        counts = torch.full((len(pruned.layers), batch), kept)
        cache = filled_cache(pruned, context, counts)
        run = model if name == "kvprune" else _compiled(model, device)
        calls[name] = _call(stepper(run, cache, batch, STEPS))
    for kind in ("dynamic", "static"):
        cache = dense_cache(kind, dense, batch, context, room)
        calls[f"{kind.title()}Cache"] = _call(stepper(dense, cache, batch, STEPS))
    cache = dense_cache("static", dense, batch, context, room)
    compiled = _compiled(twin(dense), device)
    calls["StaticCache, compiled"] = _call(stepper(compiled, cache, batch, STEPS))
    return calls


def _compiled(model, device: torch.device):
    """With CUDA graphs; on a CPU only traced, which takes no compiler."""
    options = {"mode": "reduce-overhead"} if device.type == "cuda" else {"backend": "eager"}
    return torch.compile(model, dynamic=True, **options)


def _call(run: Callable[[], None]) -> Contestant:
    def call() -> Tensor:
        run()
        return torch.zeros(())

    return Contestant(call)
