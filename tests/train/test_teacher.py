"""Distillation by hidden states, and the teacher's states on disk: against plain logits."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import zoo
from kvprune import PruneError
from kvprune.train.distill import kl_to_teacher
from kvprune.train.head import frozen_head, hidden_kl
from kvprune.train.teacher_store import TeacherStore
from training_runs import logged, make_rows, make_trainer, small_model, weights

LORA = {"tune": "lora", "lora_rank": 2, "distill": 1.0, "base_lr": 1e-2}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 128])
def test_hidden_kl_is_the_kl_of_the_logits(bias, chunk):
    torch.manual_seed(0)
    head = nn.Linear(5, 11, bias=bias).requires_grad_(False)
    student, other = (torch.randn(7, 5, requires_grad=True) for _ in range(2))
    other.data.copy_(student.data)
    teacher = torch.randn(7, 5)
    labels = torch.zeros(1, 8, dtype=torch.long)
    pad = torch.zeros(1, 11)  # the last position predicts nothing
    logits = [torch.cat([head(h), pad])[None] for h in (other, teacher)]
    want, got = kl_to_teacher(*logits, labels), hidden_kl(student, teacher, head, chunk)
    assert_close(got, want)
    (2 * want).backward()
    (2 * got).backward()
    assert_close(student.grad, other.grad)


def test_head_is_used_only_where_it_gives_the_logits():
    model = small_model("llama")
    assert frozen_head(model) is None, "it is trained"
    model.requires_grad_(False)
    assert frozen_head(model) is model.get_output_embeddings()
    assert frozen_head(small_capped()) is None


def small_capped():
    """Logits that are more than the output layer: soft-capped, as Gemma 2's."""
    model = zoo.make("gemma2")
    assert model.config.final_logit_softcapping
    model.config.final_logit_softcapping = 0.1
    return model.requires_grad_(False)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("cached", [False, True])
def test_training_is_the_same_as_with_logits(tmp_path, family, cached, monkeypatch):
    """Padding included: such rows are not stored, and their pads predict nothing."""
    rows = make_rows(24, padded=not cached)
    folder = str(tmp_path / "states") if cached else None
    runs = []
    for name, cache in (("hidden", folder), ("logits", None)):
        if name == "logits":
            monkeypatch.setattr("kvprune.train.distillation.frozen_head", lambda model: None)
        trainer = make_trainer(
            tmp_path / name, model=small_model(family), data=rows, teacher_cache=cache, **LORA
        )
        assert (trainer.distillation.head is None) == (name == "logits")
        trainer.train()
        assert not logged(trainer, "loss_next_token")
        runs.append(trainer)
    # float16 on disk moves the teacher by a thousandth; a step of Adam moves a weight by 1e-2
    # whatever the size of its gradient
    loss, weight_tolerance = (2e-3, 2e-2) if cached else (1e-5, 1e-3)
    assert logged(runs[0], "loss_kl") == pytest.approx(logged(runs[1], "loss_kl"), abs=loss)
    for name, weight in weights(runs[1]).items():
        assert_close(weights(runs[0])[name], weight, rtol=0, atol=weight_tolerance)


def test_each_row_is_taught_once(tmp_path, monkeypatch):
    """Three epochs, and a second run: the teacher reads each of the 8 rows a single time."""
    reads = []
    put = TeacherStore.put
    monkeypatch.setattr(
        TeacherStore, "put", lambda self, ids, states: (reads.append(1), put(self, ids, states))
    )
    for run in ("first", "second"):
        trainer = make_trainer(
            tmp_path / run, model=small_model("llama"), data=make_rows(8), steps=6,
            teacher_cache=str(tmp_path / "states"), **LORA,
        )  # fmt: skip
        trainer.train()
        assert len(reads) == 8
    assert len(trainer.distillation.store.spans) == 8


def test_store_survives_a_kill(tmp_path):
    ids = [torch.arange(5) + i for i in range(3)]
    states = [torch.randn(5, 4) for _ in ids]
    store = TeacherStore(tmp_path, "llama", 4)
    store.put(ids[0], states[0])
    # killed while it wrote: states without a record, or half a record
    with (tmp_path / "states.bin").open("ab") as file:
        file.write(b"xyz")
    with (tmp_path / "index.bin").open("ab") as file:
        file.write(b"xyz")
    store = TeacherStore(tmp_path, "llama", 4)
    for row, state in zip(ids[1:], states[1:], strict=True):
        assert store.get(row) is None
        store.put(row, state)
    store = TeacherStore(tmp_path, "llama", 4)
    for row, state in zip(ids, states, strict=True):
        assert_close(store.get(row), state.half().float(), rtol=0, atol=0)


def test_two_runs_share_a_store(tmp_path):
    """Both opened while it was empty; neither overwrites what the other wrote."""
    ids = [torch.arange(5) + i for i in range(4)]
    states = [torch.randn(5, 4) for _ in ids]
    stores = [TeacherStore(tmp_path, "llama", 4) for _ in range(2)]
    for i, (row, state) in enumerate(zip(ids, states, strict=True)):
        stores[i % 2].put(row, state)
    stores[0].put(ids[1], torch.zeros(5, 4))
    fresh = TeacherStore(tmp_path, "llama", 4)
    assert len(fresh.spans) == 4
    for row, state in zip(ids, states, strict=True):
        assert_close(fresh.get(row), state.half().float(), rtol=0, atol=0)


def test_store_of_another_model_is_refused(tmp_path):
    TeacherStore(tmp_path, "llama", 4)
    with pytest.raises(PruneError, match="holds states of llama"):
        TeacherStore(tmp_path, "gpt2", 4)
    with pytest.raises(PruneError, match="does not fit into float16"):
        TeacherStore(tmp_path, "llama", 4).put(torch.arange(1), torch.full((1, 4), 1e9))


def test_store_needs_a_frozen_head(tmp_path):
    with pytest.raises(PruneError, match=r"teacher_cache=.* needs distill=1"):
        make_trainer(tmp_path, distill=1.0, teacher_cache=str(tmp_path / "states"))
