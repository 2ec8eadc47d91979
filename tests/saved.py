"""A small model on disk, with a tokenizer of bytes and an adapter: what commands are given."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvprune
import zoo
from helpers import uneven_gates

POSITIONS = 200


def tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0, **{letter: i + 1 for i, letter in enumerate(letters)}}
    made = Tokenizer(models.BPE(vocab, [], unk_token=None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def save(path: Path, positions: int = POSITIONS) -> Path:
    """path/model dense, path/adapter its pruning, path/whole both in one with other weights."""
    model = zoo.make("llama", vocab_size=257, max_position_embeddings=positions)
    model.save_pretrained(path / "model")
    tokenizer().save_pretrained(path / "model")
    with kvprune.attach(model, kvprune.PruningConfig(rank=8)) as pruned:
        uneven_gates(pruned)
        model.config.name_or_path = str(path / "model")
        pruned.save(path / "adapter")
        pruned.save(path / "whole")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.9)
    model.save_pretrained(path / "whole")
    tokenizer().save_pretrained(path / "whole")
    return path
