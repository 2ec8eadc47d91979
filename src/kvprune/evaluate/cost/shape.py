"""The sizes of a model that decide what it costs, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvprune.errors import PruneError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

# known without a download: layers, heads and width of the paper's Tab. gpt-stats
GPT2_SIZES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer; `projections`: how many weights its q, k, v and o have together."""

    query_heads: int
    key_heads: int
    key_size: int
    value_size: int
    projections: int
    window: int | None = None  # tokens that it sees; None: all of them, and it can be pruned


@dataclass(frozen=True)
class Shape:
    """A decoder-only model; weights are counted as one token meets them, without biases."""

    name: str
    dtype: str
    width: int
    positions: int | None
    layers: tuple[AttentionShape, ...]
    feed_forward: int  # weights outside of attention, of all layers; routed experts by their share
    logits: int
    parameters: int  # everything stored, including embeddings, norms, biases and all experts

    @property
    def pruned_layers(self) -> int:
        return sum(layer.window is None for layer in self.layers)


def read_shape(name: str | Path | PreTrainedConfig, dtype: str = "auto") -> Shape:
    """Shape of a folder with config.json, a hub name, tiny, gpt2 to gpt2-xl, or a configuration.

    No weights are read or created. `dtype`: auto is that of the configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    from kvprune.integration import host

    config = name if isinstance(name, PreTrainedConfig) else load_config(name)
    shown = config.name_or_path or config.model_type if name is config else str(name)
    # parameters without storage: a model of any size in a second
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise PruneError(
            f"{shown} is no causal language model: {str(error).splitlines()[0]}"
        ) from error
    sites = host.find_sites(model)
    if any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
        raise PruneError(
            f"{shown} has convolution, Mamba or linear attention besides its attention, whose cost "
            f"is not modelled; measure it with kvprune eval throughput"
        )
    experts = host.experts_per_token(config)
    layers = tuple(
        AttentionShape(
            *host.heads(config), _weights(site.module, experts), host.window(site.module)
        )
        for site in sites
    )
    head = model.get_output_embeddings()
    logits = head.weight.numel()
    attention = sum(layer.projections for layer in layers)
    # a head that shares its weights with the embedding is counted once among the parameters
    others = _weights(model, experts) - attention - _weights(head, experts)
    text = config.get_text_config()
    return Shape(
        name=shown,
        dtype=str(config.dtype or "float32").removeprefix("torch.") if dtype == "auto" else dtype,
        width=int(text.hidden_size),
        positions=host.max_positions(config),
        layers=layers,
        feed_forward=others,
        logits=logits,
        parameters=sum(p.numel() for p in model.parameters()),
    )


def load_config(name: str | Path) -> PreTrainedConfig:
    """A model's configuration by name; the four sizes of GPT-2 need no network."""
    from transformers import AutoConfig, GPT2Config

    from kvprune.adapters.pretrained import cannot_load, readable
    from kvprune.adapters.resolve import own_name, resolve_base

    config: PreTrainedConfig
    base = resolve_base(name).base
    if str(name) in GPT2_SIZES and not Path(name).exists():
        layers, heads, width = GPT2_SIZES[str(name)]
        return GPT2Config(n_layer=layers, n_head=heads, n_embd=width)
    place = readable(base)
    try:
        config = AutoConfig.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise cannot_load("configuration", base, error) from error
    if own_name(base):
        # stored in half precision to be small, run in float32
        config.dtype = "float32"
    return config


def _weights(part: nn.Module, experts: int) -> int:
    """Weights in the matrix products of one token; look-ups and biases do not count."""
    from torch import nn

    total = 0
    for module in part.modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                continue
            if weight.dim() == 2:
                total += weight.numel()
            elif weight.dim() == 3:  # (experts, ..., ...)
                total += weight.numel() // len(weight) * experts
    return total
