"""Dense, local and strided attention through attach."""

import pytest
import torch
from torch.testing import assert_close

import kvprune
import oracle
import zoo
from helpers import random_ids, reading, real_pairs, real_tokens, visible
from kvprune import DenseConfig, LocalConfig, StridedConfig
from kvprune.ops.timeline import make_timeline

CONFIGS = [
    (DenseConfig(), lambda T, real: oracle.local_keep(T, T, real)),
    (LocalConfig(window=1), lambda T, real: oracle.local_keep(T, 1, real)),
    (LocalConfig(window=5), lambda T, real: oracle.local_keep(T, 5, real)),
    (StridedConfig(stride=1), lambda T, real: oracle.strided_keep(T, 1, real)),
    (StridedConfig(stride=4), lambda T, real: oracle.strided_keep(T, 4, real)),
]


@pytest.mark.parametrize(("config", "keep_of"), CONFIGS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("T", [1, 4, 23])
def test_pattern_against_the_oracle(config, keep_of, padding, T):
    real = real_tokens(2, T, padding)
    steps = config.drop_steps(reading(make_timeline(real, (2, T), torch.device("cpu"))))
    want = keep_of(T, real).bool().expand(2, T, T)
    pairs = real_pairs(real, 2, T)
    assert torch.equal(visible(steps) & pairs, want & pairs)


@pytest.mark.parametrize(("config", "keep_of"), CONFIGS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_logits_and_sparsity_of_models(config, keep_of, name):
    model = zoo.make(name)
    ids = random_ids(2, 30)
    with torch.no_grad():
        dense = model(ids).logits
    with kvprune.attach(model, config) as pruned:
        model.train()
        out = model(ids, labels=ids)
        out.loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        sparsity = pruned.sparsity()
        keep = keep_of(30, torch.ones(2, 30, dtype=torch.bool))
        want = oracle.sparsity([keep] * len(pruned.layers))
        assert_close(sparsity.per_layer.tolist(), [float(x) for x in want], atol=1e-6, rtol=0)
        assert float(pruned.sparsity_loss()) == pytest.approx(1 - sparsity.total, abs=1e-6)
        model.eval()
        with torch.no_grad():
            assert_close(model(ids).logits, out.logits, atol=1e-5, rtol=0)
        assert len(pruned.interactions) == 0
    same = isinstance(config, DenseConfig) or config == StridedConfig(stride=1)
    assert ((dense - out.logits).abs().max() < 1e-4) == same


def test_local_attention_equals_a_sliding_window():
    """The same as the sliding window of transformers with the same width."""
    plain = zoo.make("mistral")
    sliding = zoo.make("mistral", sliding_window=6)
    sliding.load_state_dict(plain.state_dict())
    ids = random_ids(2, 40)
    kvprune.attach(plain, LocalConfig(window=6))
    with torch.no_grad():
        assert_close(plain(ids).logits, sliding(ids).logits, atol=5e-5, rtol=0)
