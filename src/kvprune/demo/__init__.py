"""The idea in two minutes: train the small model to prune, and compare it with the dense one."""

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
# the batch whose speed is measured: rows, tokens per prompt, new tokens
BATCH, PROMPT_TOKENS, NEW_TOKENS = 16, 384, 64


@dataclass(frozen=True)
class Measurements:
    """Quality, sparsity, cache size and speed of one of the two models."""

    perplexity: float
    sparsity: dict[int, float]  # by context size: the share that the last token cannot see
    cache_bytes: int
    tokens_per_second: float
    text: str


@dataclass(frozen=True)
class Run:
    """The results of the demo."""

    model: str
    steps: int
    seconds: float  # of fine-tuning
    tokens: int  # of fine-tuning
    prompt: str
    dense: Measurements
    pruned: Measurements


def run(
    steps: int = 50, gamma: float = 0.2, seed: int = 0, folder: str | Path | None = None
) -> Run:
    """Train the small model to prune, then measure both; `folder`: where to save the result."""
    try:
        from kvprune.text.rows import DataConfig, load_rows
        from kvprune.train import PruningTrainer, TrainConfig
    except ImportError as error:
        raise PruneError(
            "the demo trains a model and needs more packages: pip install 'kvprune[train]'"
        ) from error
    dense, model, tokenizer = tiny.load_model(), tiny.load_model(), load_tokenizer(tiny.NAME)
    files = {name: str(tiny.text_file(name)) for name in ("train", "held_out")}
    corpus = DataConfig((files["train"],), LENGTH, held_out_source=files["held_out"], seed=seed)
    data = load_rows(corpus, tokenizer)
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
    cache = caches["pruned"]
    assert isinstance(cache, PrunedCache)
    measurements = {
        "dense": Measurements(
            *_quality(dense, held_out), cache.dense_nbytes, speeds["dense"],
            continuation(dense, tokenizer, PROMPT),
        ),
        "pruned": Measurements(
            *_quality(pruned, held_out), cache.nbytes, speeds["pruned"],
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
        **measurements,
    )


def _quality(model: PreTrainedModel | Pruned, rows: Tensor) -> tuple[float, dict[int, float]]:
    """Perplexity over all contexts, and sparsity by context."""
    *by_context, total = perplexity(model, rows, CONTEXTS, progress=False)
    return total.perplexity, {int(row.context): row.sparsity for row in by_context}


def _speeds(
    models: dict[str, PreTrainedModel], text: Tensor, rounds: int = 3
) -> tuple[dict[str, float], dict[str, Any]]:
    """Median tokens per second of each, measured alternately; and their caches at the end."""
    ids = text[:BATCH, :PROMPT_TOKENS]
    seconds: dict[str, list[float]] = {name: [] for name in models}
    caches = {}
    for number in range(rounds + 1):
        for name, model in models.items():
            start = time.perf_counter()
            out: Any = model.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True,
            )  # fmt: skip
            # the first round includes compilation
            if number:
                seconds[name].append(time.perf_counter() - start)
            caches[name] = out.past_key_values
    written = len(ids) * NEW_TOKENS
    return {name: written / statistics.median(s) for name, s in seconds.items()}, caches


def continuation(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """A sampled continuation of the prompt, the same at each call."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.random.fork_rng():
        torch.manual_seed(1)
        out: Any = model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=True,
            temperature=0.7, top_k=40, top_p=0.95,
        )  # fmt: skip
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
