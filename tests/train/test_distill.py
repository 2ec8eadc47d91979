"""Chunked KL against the plain formula, and the model as its own teacher."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import kvprune
from helpers import random, random_ids, uneven_gates
from kvprune import PruningConfig
from kvprune.adapters import lora
from kvprune.adapters.dense import as_base_model
from kvprune.train import distill
from training_runs import small_model


def plain_kl(student, teacher, labels):
    keep = labels[:, 1:] != -100
    s, t = student[:, :-1][keep].log_softmax(-1), teacher[:, :-1][keep].log_softmax(-1)
    return F.kl_div(s, t, log_target=True, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 3, 17, 1000])
@pytest.mark.parametrize("T", [2, 9])
def test_matches_the_plain_formula(chunk, T):
    student, teacher = (random(3, T, 31, seed=i, dtype=torch.float32) * 3 for i in (0, 1))
    labels = random_ids(3, T)
    labels[1, : T // 2 + 1] = -100
    a, b = student.clone().requires_grad_(), student.clone().requires_grad_()
    want, got = plain_kl(a, teacher, labels), distill.kl_to_teacher(b, teacher, labels, chunk)
    assert_close(got, want)
    (2.5 * want).backward()
    (2.5 * got).backward()
    assert_close(b.grad, a.grad)
    assert b.grad[1, 0].eq(0).all()


def test_bfloat16_logits_are_summed_in_float32():
    student, teacher = (random(2, 40, 501, seed=i).bfloat16() * 3 for i in (0, 1))
    got = distill.kl_to_teacher(student, teacher, random_ids(2, 40))
    assert got.dtype == torch.float32
    assert_close(got.double(), plain_kl(student.double(), teacher.double(), random_ids(2, 40)))


def test_nothing_to_predict_and_impossible_tokens():
    logits = random(1, 4, 5, dtype=torch.float32).requires_grad_()
    ignored = torch.full((1, 4), -100)
    assert distill.kl_to_teacher(logits, logits.detach(), ignored) == 0
    never = logits.detach().clone()
    never[..., 2] = -torch.inf
    kl = distill.kl_to_teacher(logits, never, random_ids(1, 4))
    assert kl.isfinite()
    kl.backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("with_lora", [False, True])
def test_model_is_its_own_teacher(with_lora):
    model, ids = small_model(), random_ids(2, 24)
    want = model(ids).logits.detach()
    if with_lora:
        lora.add(model, rank=2, alpha=4)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_()
    pruned = kvprune.attach(model, PruningConfig(rank=8, protect_first=2))
    uneven_gates(pruned)
    model.train()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    before = model(ids, use_cache=False).logits
    with torch.no_grad(), as_base_model(pruned):
        assert_close(model(ids, use_cache=False).logits, want, atol=1e-5, rtol=1e-5)
    assert_close(model(ids, use_cache=False).logits, before)
    assert (before - want).abs().max() > 0.1
    assert model.training
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable
