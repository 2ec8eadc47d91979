"""Settings of the authors' code: initial weights and dropout."""

import pytest
import torch

import zoo
from kvprune import PruneError, PruningConfig
from kvprune.train.config import TrainConfig
from kvprune.train.prepare import prepare


def prepared(family="gpt2", **settings):
    torch.manual_seed(0)
    config = TrainConfig(method=PruningConfig(rank=16), spread=False, **settings)
    return prepare(zoo.make(family), config, None)[0]


def test_initial_weights_have_the_deviation_that_was_asked_for():
    usual, small = prepared(), prepared(init_std=0.02)
    width = usual.interactions[0].query.in_features
    for a, b in zip(usual.interactions, small.interactions, strict=True):
        for name in ("query", "key"):
            weight, other = getattr(a, name).weight, getattr(b, name).weight
            assert float(other.detach().std()) == pytest.approx(0.02, rel=0.15)
            # the same draw
            torch.testing.assert_close(other, weight * 0.02 * width**0.5)
        assert a.beta == b.beta


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout_is_that_of_the_settings_everywhere(family):
    ids = torch.arange(12)[None] % 50
    given = {"gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
             "llama": {"attention_dropout": 0.5}}[family]  # fmt: skip

    def differs(share):
        torch.manual_seed(0)
        config = TrainConfig(method=PruningConfig(rank=4), dropout=share)
        pruned = prepare(zoo.make(family, **given), config, None)[0]
        pruned.model.train()
        with torch.no_grad():
            return not torch.equal(pruned.model(ids).logits, pruned.model(ids).logits)

    assert differs(None)
    assert not differs(0.0)
    assert differs(0.3)


def test_what_cannot_be_is_refused():
    with pytest.raises(PruneError, match="dropout"):
        TrainConfig(dropout=1.0)
    with pytest.raises(PruneError, match="init_std"):
        TrainConfig(init_std=-0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is possible")
def test_tf32_needs_a_gpu(tmp_path):
    with pytest.raises(PruneError, match="tf32 needs a GPU"):
        TrainConfig(tf32=True).arguments(tmp_path)
