"""What fine-tuning needs of a GPU's memory, by formula.

As `kvprune train --bf16` does it: weights in float32, products in bfloat16 by autocast, AdamW. What
a layer keeps for its backward pass is exact: a test counts it on small models. Tiles in work and
logits are estimates, on the high side.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

from kvprune.evaluate.roofline.models import Decoder

# bytes that a layer keeps for the backward pass, per token: times width, inner width, queries and
# keys + values of all heads; autocast makes a copy of its input for each product, LoRA another
SAVED = {"lora": (22, 8, 6, 6), "all": (30, 8, 6, 6)}
# the same of each number of a query and of a key that is normalised, and one scale per head
SAVED_NORMS = {"lora": 4, "all": 6}
# products with LoRA in a layer; each keeps what lies between its two matrices
LORA_LAYERS = 7
# in plain torch: a carry for every block of queries, and tiles of scores in work at the same time
BLOCK, TILES = 128, 4
# with Triton: two workspaces, which also say how many queries share a carry; tiles of 64 × 64
WORKSPACE, TILE = 2**26, 64
# positions whose logits exist together when the model is compared with its dense self
CHUNK = 128
# CUDA's own, and what the allocator cannot use
CONTEXT = 2**30


class Run(NamedTuple):
    """A training step on one device."""

    rows: int
    length: int
    tune: Literal["lora", "all"] = "lora"
    distill: bool = True
    checkpointing: bool = True
    lora_rank: int = 16
    rank: int = 64
    triton: bool = True


@dataclass(frozen=True)
class Memory:
    """Bytes by what they hold."""

    weights: float
    teacher: float  # LoRA's is the model itself
    trained: float  # gradients and AdamW's two means of what is trained, and LoRA's own weights
    activations: float
    tiles: float
    logits: float
    context: float = CONTEXT

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


def fine_tuning(model: Decoder, run: Run) -> Memory:
    """At the highest point of a step: all layers have run forward, one is on its way back.

    weights      4 · parameters
    trained      12 · parameters of the model, 16 · those of LoRA and the interaction
    activations  checkpointed: 4 · width per token and layer, and one layer twice (its tensors and
                 their gradients); else every layer, and one twice
    tiles        of attention: Triton's two workspaces of 64 MB; without it 16 · heads · 128 · T for
                 each row
    logits       KL from hidden states: a chunk's, and the output layer in bfloat16; else of all
                 tokens, four times in float32
    """
    tokens, full = run.rows * run.length, run.tune == "all"
    own = model.layers * (2 * model.width * run.rank + 1)
    if not full:
        own += model.layers * lora_weights(model, run.lora_rank)
    layer = saved_by_layer(model, run)
    every = 4.0 * model.width * tokens if run.checkpointing else saved_by_layer(model, run)
    output = model.vocabulary * model.width * 2
    if run.distill and not full:
        logits = output + 4 * CHUNK * model.vocabulary * 4 + 3 * 4 * model.width * tokens
    else:
        logits = output + 4 * 4 * model.vocabulary * tokens
    return Memory(
        weights=4 * model.parameters,
        teacher=4 * model.parameters if full and run.distill else 0,
        trained=16 * own + (12 * model.parameters if full else 0),
        activations=model.layers * every + 2 * layer,
        tiles=2.0 * WORKSPACE if run.triton else TILES * tokens * model.heads * BLOCK * 4.0,
        logits=logits,
    )


def lora_weights(model: Decoder, rank: int) -> int:
    """Of one layer: two thin matrices beside each of the seven."""
    queries, keys = model.heads * model.size, model.key_heads * model.size
    attention = 2 * (model.width + queries) + 2 * (model.width + keys)
    return rank * (attention + 3 * (model.width + model.inner))


def saved_by_layer(model: Decoder, run: Run) -> float:
    """Bytes that one layer keeps for its backward pass, the weights' copies in bfloat16 among them.

    The carries are all that grows with T²: 4 · T² / 128, 8 MB at 16,384 tokens, less with Triton.
    """
    tokens = run.rows * run.length
    width, inner, query, key = SAVED[run.tune]
    queries, keys = model.heads * model.size, model.key_heads * model.size
    token = width * model.width + inner * model.inner + query * queries + key * keys
    token += 2 * 4 * run.rank + 2 * 4  # and what two norms divide by
    if model.norms:
        token += SAVED_NORMS[run.tune] * (queries + keys) + 4 * (model.heads + model.key_heads)
    copies = 2 * model.layer_weights
    if run.tune == "lora":
        token += 2 * LORA_LAYERS * run.lora_rank
        copies += 2 * lora_weights(model, run.lora_rank)
    if run.triton:
        # attention's output, and what its softmax divided by
        token += 2 * queries + 4 * model.heads
    carries = run.rows * run.length * 4 * -(-run.length // _queries_per_carry(run))
    keep_sum = 4 * run.rows
    return float(tokens * token + copies + carries + keep_sum)


def _queries_per_carry(run: Run) -> int:
    if not run.triton:
        return BLOCK
    return max(1, WORKSPACE // 4 // (run.rows * run.length * TILE)) * TILE
