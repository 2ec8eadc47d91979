"""Untrained models of known shapes, and how many tokens their caches hold."""

import gzip
from importlib.resources import files

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kvprune
from kvprune.evaluate.throughput.bfloat16 import is_emulated, multiply_in_float32
from kvprune.evaluate.throughput.rigged import set_beta


def gpt2(precision: str, quick: bool = False) -> GPT2LMHeadModel:
    """GPT-2 small's shape with random weights; a slice of it if `quick`."""
    torch.manual_seed(0)
    config = GPT2Config(n_positions=2048)
    if quick:
        config.n_layer, config.vocab_size = 2, 1000
    return in_precision(GPT2LMHeadModel(config).eval(), precision)


def in_precision(model, precision: str):
    model = model.to(getattr(torch, precision))
    if precision == "bfloat16" and is_emulated():
        multiply_in_float32(model)
    return model


def llama(
    positions: int, layers: int = 12, precision: str = "float32", vocabulary: int = 8192
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=positions,
    )  # fmt: skip
    return in_precision(LlamaForCausalLM(config).eval(), precision)


def attached(model: PreTrainedModel) -> kvprune.Pruned:
    """Votes that drop one slot in 200 per step, so that the cache keeps its size."""
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=64))
    set_beta(pruned, 2.58)
    return pruned


def real_rows(pruned: kvprune.Pruned, rows: int, length: int) -> torch.Tensor:
    """English text, (rows, length) tokens: parts of what `tiny` was trained on."""
    text = gzip.decompress((files("kvprune.tiny") / "train.txt.gz").read_bytes()).decode()
    part = len(text) // rows
    texts = [text[row * part :][: 8 * length] for row in range(rows)]
    tokenizer = pruned.tokenizer
    return torch.tensor([tokenizer(text, verbose=False).input_ids[:length] for text in texts])


def survivors(
    layers: int, batch: int, context: float, sparsity: float, uneven: bool = True
) -> torch.Tensor:
    """Tokens kept, (layers, batch): ±40 % between rows, ±40 % between layers, the given mean."""
    random = torch.Generator().manual_seed(0)
    share = torch.ones(layers, batch)
    if uneven:
        share = 0.6 + 0.8 * torch.rand(layers, batch, generator=random)
        share *= 0.6 + 0.8 * torch.rand(layers, 1, generator=random)
    kept = share / share.mean() * context * (1 - sparsity)
    return kept.round().long().clamp(1, int(context))
