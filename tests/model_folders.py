"""A small model on disk with a byte tokenizer and an adapter, as input of commands."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvprune
import zoo
from helpers import uneven_gates

POSITIONS = 200


def byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0, **{letter: i + 1 for i, letter in enumerate(letters)}}
    byte_level = Tokenizer(models.BPE(vocab, [], unk_token=None))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="<end>")


def save(path: Path, positions: int = POSITIONS) -> Path:
    """path/model: dense; path/adapter: its pruning; path/whole: both, with other weights."""
    model = zoo.make("llama", vocab_size=257, max_position_embeddings=positions)
    model.save_pretrained(path / "model")
    byte_tokenizer().save_pretrained(path / "model")
    with kvprune.attach(model, kvprune.PruningConfig(rank=8)) as pruned:
        uneven_gates(pruned)
        model.config.name_or_path = str(path / "model")
        pruned.save(path / "adapter")
        pruned.save(path / "whole")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.9)
    model.save_pretrained(path / "whole")
    byte_tokenizer().save_pretrained(path / "whole")
    return path
