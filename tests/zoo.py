"""Tiny random causal LMs, one per family, built from configs: no network, fixed by the seed.

Weights are large enough that attention is far from uniform and logits vary. There is no end token,
so that generation always runs to its full length.
"""

from collections.abc import Callable

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB = 101
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = COMMON | {"num_key_value_heads": 2}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_inner": 96,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.2,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# shorter than the texts of the tests
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}

FAMILIES: dict[str, tuple[str, dict]] = {
    "gpt2": ("GPT2Config", GPT2),
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": None}),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", GROUPED | {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        GROUPED
        | SLIDING
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "phi3": ("Phi3Config", GROUPED | {"embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "gpt_neox": ("GPTNeoXConfig", COMMON | {"hidden_dropout": 0.0}),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "init_std": 0.2,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
        },
    ),
    "stablelm": ("StableLmConfig", GROUPED | {"hidden_dropout": 0.0}),
    "gemma": ("GemmaConfig", GROUPED | {"head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        GROUPED | SLIDING | {"num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 24},
    ),
    "olmo2": ("Olmo2Config", GROUPED),
    "olmo3": ("Olmo3Config", GROUPED | SLIDING | {"num_hidden_layers": 4}),
    "cohere": ("CohereConfig", GROUPED | {"logit_scale": 1.0}),
    "cohere2": ("Cohere2Config", GROUPED | SLIDING | {"num_hidden_layers": 4, "logit_scale": 1.0}),
    "granite": ("GraniteConfig", GROUPED | {"attention_multiplier": 0.4}),
    "phi": ("PhiConfig", GROUPED | {"embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "starcoder2": (
        "Starcoder2Config",
        GROUPED | {"sliding_window": None, "embedding_dropout": 0.0, "residual_dropout": 0.0},
    ),
    "smollm3": ("SmolLM3Config", GROUPED),
    "gpt_bigcode": ("GPTBigCodeConfig", GPT2 | {"multi_query": True}),
    "biogpt": (
        "BioGptConfig",
        COMMON | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", GROUPED | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", GROUPED | EXPERTS | {"head_dim": 16}),
    "gpt_oss": (
        "GptOssConfig",
        GROUPED
        | SLIDING
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        GROUPED
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "attention_chunk_size": 16,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        COMMON
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    # hybrids of attention with Mamba, convolution or linear attention
    "bamba": (
        "BambaConfig",
        GROUPED
        | {
            "num_hidden_layers": 4,
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "jamba": (
        "JambaConfig",
        GROUPED
        | {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        GROUPED
        | {
            "head_dim": 16,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        GROUPED | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        GROUPED
        | EXPERTS
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "shared_expert_intermediate_size": 32,
        },
    ),
}


REFUSALS: dict[str, tuple[str, str, dict]] = {
    # an encoder
    "bert": ("BertForMaskedLM", "BertConfig", COMMON),
    # an encoder-decoder
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "eos_token_id": None,
            "decoder_start_token_id": 0,
        },
    ),
    # causal LMs that compute attention themselves
    "falcon": ("FalconForCausalLM", "FalconConfig", COMMON),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", GPT2 | {"rotary_dim": 8}),
    # no attention at all
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2},
    ),
    # sliding attention in every layer
    "mistral_sliding": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 8}),
}


def _maker(
    model_class: str | None, config_class: str, fields: dict
) -> Callable[..., PreTrainedModel]:
    def maker(attn_implementation: str | None = None, **overrides) -> PreTrainedModel:
        config = getattr(transformers, config_class)(**(fields | overrides))
        family = getattr(transformers, model_class) if model_class else AutoModelForCausalLM
        make_from = family.from_config if model_class is None else family._from_config
        return make_from(config, attn_implementation=attn_implementation).float().eval()

    return maker


ZOO: dict[str, Callable[..., PreTrainedModel]] = {
    name: _maker(None, *family) for name, family in FAMILIES.items()
}
REFUSED: dict[str, Callable[..., PreTrainedModel]] = {
    name: _maker(*refusal) for name, refusal in REFUSALS.items()
}


def make(name: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A new model of ZOO or REFUSED; overrides: config fields, or attn_implementation."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return (ZOO | REFUSED)[name](**overrides)
