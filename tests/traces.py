"""Traces of random drops, and small pruned models with a real tokenizer."""

import numpy as np
import torch

import kvprune
import zoo
from helpers import attach_uneven
from kvprune.adapters.pretrained import load_tokenizer
from kvprune.explain import Trace

VOCAB = 4096
TEXT = "The cat sat on the mat, and then it slept.\nNobody said why; 12 dogs did not care."


def tokenizer():
    return load_tokenizer("tiny")


def pruned_model(family: str = "gpt2", **options) -> kvprune.Pruned:
    return attach_uneven(zoo.make(family, vocab_size=VOCAB), **options)


def random_trace(L: int, T: int, seed: int = 0, tokens: tuple[str, ...] | None = None) -> Trace:
    """Random lifetimes of all lengths; about a third of the tokens stay."""
    rng = np.random.default_rng(seed)
    words = (" the", " cat", ",", " sat", ".", "\n", " on", "ing", " 12", " mat")
    life = rng.geometric(rng.uniform(0.01, 0.2, (L, 1)), (L, T))
    step = np.where(rng.random((L, T)) < 1 / 3, kvprune.NEVER, np.arange(T) + life)
    return Trace(
        tokens=tokens or tuple(words[i] for i in rng.integers(0, len(words), T)),
        ids=tuple(range(T)),
        drop_step=np.minimum(step, kvprune.NEVER),
        layers=tuple(range(L)),
        prompt=T // 2,
        kept_bytes=100,
        dense_bytes=90,
        model="random",
    )


def generate_batch(pruned, tok, texts, new=30, **options):
    """Generate for a left-padded batch with a cache that records; returns output and inputs."""
    tok.pad_token = tok.eos_token
    inputs = tok(texts, return_tensors="pt", padding=True, padding_side="left")
    cache = kvprune.PrunedCache(pruned, record=True)
    torch.manual_seed(0)
    out = pruned.model.generate(
        **inputs, max_new_tokens=new, past_key_values=cache, return_dict_in_generate=True,
        pad_token_id=tok.pad_token_id, **{"do_sample": False, **options},
    )  # fmt: skip
    return out, inputs
