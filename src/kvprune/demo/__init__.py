"""The idea in two minutes: teach the small model to forget, and set it beside what it was."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvprune import tiny
from kvprune.adapters.pretrained import load_tokenizer
from kvprune.cache.pruned_cache import PrunedCache
from kvprune.config import PruningConfig
from kvprune.errors import PruneError
from kvprune.evaluate.perplexity.measure import perplexity
from kvprune.integration.handle import Pruned

LENGTH = 512
CONTEXTS = (64, 128, 256, 512)
PROMPT = "Dorothy looked at the great green gate of the city, and then she"
# a batch that reads and writes: rows, tokens read, tokens written
BATCH, READ, WRITTEN = 16, 384, 64


@dataclass(frozen=True)
class Side:
    """One of the two models: how good, how sparse, how large, how fast."""

    perplexity: float
    sparsity: dict[int, float]  # by context size: the share of it that the last token cannot see
    cache_bytes: int
    tokens_per_second: float
    text: str


@dataclass(frozen=True)
class Run:
    """All that the demo shows."""

    model: str
    steps: int
    seconds: float  # of fine-tuning
    tokens: int  # that it was fine-tuned on
    prompt: str
    dense: Side
    pruned: Side


def run(
    steps: int = 50, gamma: float = 0.2, seed: int = 0, folder: str | Path | None = None
) -> Run:
    """Fine-tune pruning into the small model, then measure both; `folder` keeps the result."""
    try:
        from kvprune.text.rows import DataConfig, load_rows
        from kvprune.train import PruningTrainer, TrainConfig
    except ImportError as error:
        raise PruneError(
            "the demo trains, and needs more packages: pip install 'kvprune[train]'"
        ) from error
    dense, model, tokenizer = tiny.load_model(), tiny.load_model(), load_tokenizer(tiny.NAME)
    files = {name: str(tiny.text_file(name)) for name in ("train", "held_out")}
    source = DataConfig((files["train"],), LENGTH, held_out_source=files["held_out"], seed=seed)
    data = load_rows(source, tokenizer)
    assert data.held_out is not None
    config = TrainConfig(
        method=PruningConfig(rank=32), gamma=gamma, distill=1.0, steps=steps, batch=4, warmup=5,
        interaction_lr=1.5e-3, base_lr=3e-4, lr_schedule="linear", log_every=5, seed=seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        args = config.arguments(
            scratch, report_to=[], eval_strategy="no", save_strategy="no", disable_tqdm=False,
        )  # fmt: skip
        trainer = PruningTrainer(
            model, config, args, train_dataset=data.train, eval_dataset=data.held_out
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        if folder is not None:
            trainer.save_model(str(folder))
            tokenizer.save_pretrained(folder)
    pruned = trainer.pruned
    model.eval()
    count = len(data.held_out)
    held_out = torch.stack([data.held_out[i]["input_ids"] for i in range(0, count, count // 16)])
    speeds, caches = _speeds({"dense": dense, "pruned": model}, held_out)
    own = caches["pruned"]
    assert isinstance(own, PrunedCache)
    sides = {
        "dense": Side(
            *_quality(dense, held_out), own.dense_nbytes, speeds["dense"],
            continuation(dense, tokenizer, PROMPT),
        ),
        "pruned": Side(
            *_quality(pruned, held_out), own.nbytes, speeds["pruned"],
            continuation(model, tokenizer, PROMPT),
        ),
    }  # fmt: skip
    size = sum(p.numel() for p in dense.parameters())
    return Run(
        model=f"{size / 1e6:.1f} million parameters, {dense.config.n_layer} layers",
        steps=steps,
        seconds=seconds,
        tokens=steps * config.batch * LENGTH,
        prompt=PROMPT,
        **sides,
    )


def _quality(model: PreTrainedModel | Pruned, rows: Tensor) -> tuple[float, dict[int, float]]:
    """Perplexity over all contexts, and sparsity by context."""
    *at, whole = perplexity(model, rows, CONTEXTS, progress=False)
    return whole.perplexity, {int(row.context): row.sparsity for row in at}


def _speeds(
    models: dict[str, PreTrainedModel], text: Tensor, rounds: int = 3
) -> tuple[dict[str, float], dict[str, Any]]:
    """Tokens a second of both in turn, the median; and what is in their caches at the end."""
    ids = text[:BATCH, :READ]
    seconds: dict[str, list[float]] = {name: [] for name in models}
    caches = {}
    for number in range(rounds + 1):
        for name, model in models.items():
            start = time.perf_counter()
            out: Any = model.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=WRITTEN,
                min_new_tokens=WRITTEN, do_sample=False, return_dict_in_generate=True,
            )  # fmt: skip
            # the first round pays for compiling
            if number:
                seconds[name].append(time.perf_counter() - start)
            caches[name] = out.past_key_values
    written = len(ids) * WRITTEN
    return {name: written / statistics.median(s) for name, s in seconds.items()}, caches


def continuation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """What the model makes of a prompt; drawn, but the same at each call."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.random.fork_rng():
        torch.manual_seed(1)
        out: Any = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=True,
            temperature=0.7, top_k=40, top_p=0.95,
        )  # fmt: skip
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
