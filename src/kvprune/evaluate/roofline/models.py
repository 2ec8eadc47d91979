"""Models that people have, by the numbers of their configurations: no download is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Decoder(NamedTuple):
    """A model of Llama's kind; all weights in bfloat16 as they are published."""

    name: str
    width: int
    inner: int  # of the feed-forward part
    layers: int
    heads: int
    key_heads: int
    size: int  # of a head
    vocabulary: int
    tied: bool = True  # whether the output layer is the embedding
    norms: bool = False  # whether queries and keys are normalised (Qwen3)

    @property
    def layer_weights(self) -> int:
        """In the matrix products of one layer."""
        attention = 2 * self.width * (self.heads + self.key_heads) * self.size
        return attention + 3 * self.width * self.inner

    @property
    def parameters(self) -> int:
        norms = 2 * self.width + (2 * self.size if self.norms else 0)
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.layers * (self.layer_weights + norms) + self.width + embeddings

    def config(self, **changes: int) -> PreTrainedConfig:
        """For transformers; `changes`: fewer layers, say, for a quick look."""
        from transformers import LlamaConfig, Qwen3Config

        kind: Any = Qwen3Config if self.norms else LlamaConfig
        values = {
            "vocab_size": self.vocabulary, "hidden_size": self.width,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.key_heads,
            "head_dim": self.size, "max_position_embeddings": 131072,
        }  # fmt: skip
        config: PreTrainedConfig = kind(
            **{**values, **changes}, tie_word_embeddings=self.tied, dtype="bfloat16"
        )
        config.name_or_path = self.name
        return config


SMOLLM2 = Decoder("SmolLM2-135M", 576, 1536, 30, 9, 3, 64, 49152)
QWEN3 = Decoder("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151936, norms=True)
LLAMA_1B = Decoder("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 64, 128256)
LLAMA_8B = Decoder("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256, tied=False)
MODELS = (SMOLLM2, QWEN3, LLAMA_1B, LLAMA_8B)
