"""What we know of the host library's models, in one place: names of modules and arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2CLS

from kvprune.errors import PruneError

# the parts of a gated MLP: down_proj(act_fn(gate_proj(x)) · up_proj(x))
GATED_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
SILU = {nn.SiLU, ACT2CLS["silu"]}


@dataclass(frozen=True)
class Site:
    """An attention module of a model, and why its layer is left alone if it is."""

    name: str
    module: nn.Module
    index: int
    left_alone: str = ""


def find_sites(model: PreTrainedModel) -> list[Site]:
    """Every causal self-attention module that goes through the AttentionInterface.

    Raises if the model is of a kind that cannot be pruned, and says what would work.
    """
    if not isinstance(model, PreTrainedModel):
        raise PruneError(
            f"{type(model).__name__} is not a transformers model; pass the PreTrainedModel itself "
            f"(for a wrapped model, the one inside)"
        )
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise PruneError(
            f"{kind} is an encoder-decoder; kvprune prunes decoder-only causal models "
            f"(AutoModelForCausalLM: GPT-2, Llama, Qwen, ...)"
        )
    sites = [
        Site(name, module, module.layer_idx, _why_left_alone(module))
        for name, module in model.named_modules()
        if _uses_interface(module) and isinstance(getattr(module, "layer_idx", None), int)
    ]
    if not sites:
        raise PruneError(
            f"{kind} has no attention that goes through transformers' AttentionInterface; "
            f"it needs a causal model whose attention can be set by name, "
            f"such as GPT-2, Llama, Mistral, Qwen or GPT-NeoX"
        )
    if all(site.left_alone == "not causal" for site in sites):
        raise PruneError(
            f"{kind} is an encoder: its attention is not causal, and no token is ever past; "
            f"kvprune prunes causal models (AutoModelForCausalLM: GPT-2, Llama, Qwen, ...)"
        )
    if all(site.left_alone for site in sites):
        reasons = ", ".join(sorted({site.left_alone for site in sites}))
        raise PruneError(
            f"nothing to prune in {kind}: every attention layer is {reasons}. kvprune prunes "
            f"causal layers with full attention; for a model that allows it, set "
            f"config.sliding_window = None before loading"
        )
    return sites


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of an attention module: a keyword in Llama, Qwen2, ..., else the first argument."""
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    assert isinstance(hidden, Tensor)
    return hidden


def eager_attention(module: nn.Module) -> Callable[..., Any]:
    """The plain attention function of the module's own modelling file."""
    function: Callable[..., Any] = _forward(module).__globals__["eager_attention_forward"]
    return function


def hidden_size(module: nn.Module, config: PreTrainedConfig) -> int:
    """The width of the attention module's input."""
    config = getattr(module, "config", config).get_text_config()
    return int(config.hidden_size)


def heads(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Query heads, key heads, key size and value size, as attention and our cache see them."""
    config = config.get_text_config()
    query_heads = int(config.num_attention_heads)
    if getattr(config, "kv_lora_rank", None):
        # latent attention: what is cached is small, what attention is given is not
        return query_heads, query_heads, *_latent_sizes(config)
    key_heads = int(getattr(config, "num_key_value_heads", None) or query_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // query_heads)
    return query_heads, key_heads, size, size


def window(module: nn.Module) -> int | None:
    """How many tokens a layer with sliding or chunked attention sees; None if it sees all."""
    if not _why_left_alone(module):
        return None
    config = module.config
    chunk, slide = (getattr(config, n, None) for n in ("attention_chunk_size", "sliding_window"))
    return int(chunk or slide)  # type: ignore[arg-type]


def max_positions(model: PreTrainedModel | PreTrainedConfig) -> int | None:
    """The longest text that the model has positions for; None if its configuration has no limit."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit


def experts_per_token(config: PreTrainedConfig) -> int:
    """How many of a layer's experts one token goes through."""
    return int(getattr(config.get_text_config(), "num_experts_per_tok", 1))


def is_rms_norm(module: nn.Module) -> bool:
    """Whether it looks like one by its name and parts; what it computes is another matter."""
    return (
        type(module).__name__.endswith("RMSNorm")
        and [*module._parameters] == ["weight"]
        and isinstance(module.weight, Tensor)
        and not module._modules
        and not module._buffers
        and isinstance(norm_epsilon(module), float)
    )


def norm_epsilon(module: nn.Module) -> float:
    """What a norm adds to the mean of squares."""
    own: Any = vars(module)
    epsilon: float = own.get("variance_epsilon", own.get("eps"))
    return epsilon


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether its parts are those of an MLP that is gated by SiLU, and no more."""
    return (
        set(module._modules) == set(GATED_MLP)
        and type(module._modules["act_fn"]) in SILU
        and not module._parameters
        and not module._buffers
    )


def _latent_sizes(config: Any) -> tuple[int, int]:
    return int(config.qk_nope_head_dim + config.qk_rope_head_dim), int(config.v_head_dim)


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _uses_interface(module: nn.Module) -> bool:
    code = getattr(_forward(module), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _why_left_alone(module: nn.Module) -> str:
    config = getattr(module, "config", None)
    if getattr(module, "is_cross_attention", False):
        return "cross-attention"
    if not getattr(module, "is_causal", True):
        return "not causal"
    types = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", 0)
    if types and index < len(types):
        kind = types[index]
        return kind.replace("_", " ") if kind.startswith(("sliding", "chunked")) else ""
    window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
    return "sliding attention" if window else ""
