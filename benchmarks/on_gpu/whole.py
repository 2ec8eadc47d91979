"""A whole model's decode step: ours against transformers' caches, eager and compiled."""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvprune
from kvprune.evaluate.throughput.decoding import dense_cache, filled_cache
from kvprune.evaluate.throughput.rigged import steady_votes
from kvprune.integration.row_lora import twin
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
    room = STEPS * (sizes.rounds + WARM_UP + 3)
    kept = round((1 - sizes.sparsity) * context)
    ids = torch.randint(sizes.model.vocabulary, (1, 64), device=dense.device)
    calls = {}
    for name in ("kvprune", "kvprune, compiled"):
        model = twin(dense)
        pruned = kvprune.attach(model, kvprune.PruningConfig(rank=sizes.rank))
        steady_votes(pruned, ids, kept)
        cache = filled_cache(pruned, context, torch.full((len(pruned.layers), batch), kept))
        run = model if name == "kvprune" else _compiled(model, dynamic=True)
        calls[name] = _decoding(run, cache, batch)
    for kind, name in (("dynamic", "DynamicCache"), ("static", "StaticCache")):
        calls[name] = _decoding(dense, dense_cache(kind, dense, batch, context, room), batch)
    cache = dense_cache("static", dense, batch, context, room)
    calls["StaticCache, compiled"] = _decoding(_compiled(twin(dense), False), cache, batch)
    return calls


def _compiled(model, dynamic: bool):
    """With CUDA graphs; on a CPU only traced, which takes no compiler."""
    options = {"mode": "reduce-overhead"} if model.device.type == "cuda" else {"backend": "eager"}
    return torch.compile(model, dynamic=dynamic, **options)


def _decoding(model, cache, batch: int) -> Contestant:
    """Tokens without a mask, because none is a pad: a mask would be one token longer every time."""
    device = model.device
    token = torch.ones(batch, 1, dtype=torch.long, device=device)
    seen = int(cache.get_seq_length())

    @torch.inference_mode()
    def call() -> Tensor:
        nonlocal token, seen
        for _ in range(STEPS):
            torch.compiler.cudagraph_mark_step_begin()
            logits = model(
                input_ids=token, position_ids=torch.full((batch, 1), seen, device=device),
                past_key_values=cache, use_cache=True, logits_to_keep=1,
            ).logits  # fmt: skip
            token, seen = logits[:, -1].argmax(-1, keepdim=True), seen + 1
        return token

    return Contestant(call)
