"""What PruningTrainer computes, trains, logs and refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import kvprune
from kvprune import DenseConfig, LocalConfig, PruneError, PruningConfig, StridedConfig
from kvprune.train import PruningTrainer, TrainConfig
from training_runs import logged, make_config, make_rows, make_trainer, small_model, weights


def expected_loss(trainer: PruningTrainer, batch: list[dict], distill=0.0, teacher=None):
    """The loss of one step from a plain forward pass and the paper's formulas."""
    pruned, model = trainer.pruned, trainer.pruned.model
    ids = torch.tensor([row["input_ids"] for row in batch])
    labels = torch.tensor([row["labels"] for row in batch])
    mask = None
    if "attention_mask" in batch[0]:
        mask = torch.tensor([row["attention_mask"] for row in batch])
    model.train()
    pruned.alpha = trainer.config.alpha_start
    logits = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    want = labels[:, 1:]
    counted = want != -100
    loss = F.cross_entropy(logits[counted], want[counted])
    if distill:
        with torch.no_grad():
            dense = teacher(ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        kl = (dense.exp() * (dense - logits.log_softmax(-1))).sum(-1)[counted].mean()
        loss = (1 - distill) * loss + distill * kl
    return loss + trainer.config.gamma * pruned.sparsity_loss()


@pytest.mark.parametrize("distill", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("padded", [False, True])
def test_loss_of_a_step(tmp_path, distill, padded):
    data = make_rows(4, padded=padded)
    trainer = make_trainer(tmp_path, data=data, distill=distill, steps=1)
    want = expected_loss(trainer, data, distill, teacher=small_model())
    trainer.train()
    assert logged(trainer)[0] == pytest.approx(float(want.detach()), rel=1e-5)
    parts = trainer.state.log_history[0]
    assert parts["loss"] == pytest.approx(parts["loss_language"] + parts["loss_sparsity"], rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("padded", [False, True])
def test_accumulation_equals_one_large_batch(tmp_path, family, padded):
    data = make_rows(16, padded=padded)

    def run(batch, accumulation):
        trainer = make_trainer(
            tmp_path / f"{accumulation}", model=small_model(family), data=data, distill=0.5,
            steps=2, batch=batch, accumulation=accumulation, arguments={"optim": "sgd"},
        )  # fmt: skip
        trainer.train()
        return trainer

    one, four = run(8, 1), run(2, 4)
    for name in ("loss", "loss_language", "loss_sparsity", "sparsity_soft", "grad_norm"):
        assert logged(four, name) == pytest.approx(logged(one, name), rel=2e-5), name
    for name, want in weights(one).items():
        assert_close(weights(four)[name], want, atol=1e-6, rtol=1e-5)


def test_accumulation_for_a_model_without_loss_arguments(tmp_path, monkeypatch):
    want = make_trainer(tmp_path / "a", steps=1, batch=2, accumulation=2)
    want.train()
    model = small_model()
    model.accepts_loss_kwargs = False
    trainer = make_trainer(tmp_path / "b", model=model, steps=1, batch=2, accumulation=2)
    trainer.train()
    assert logged(trainer) == pytest.approx(logged(want), rel=1e-6)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    plain = make_trainer(tmp_path / "a", steps=2)
    saving = make_trainer(tmp_path / "b", steps=2, checkpointing=True)
    for trainer in (plain, saving):
        trainer.train()
    assert saving.pruned.model.is_gradient_checkpointing
    assert logged(saving) == pytest.approx(logged(plain), rel=1e-5)
    assert logged(saving, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-4)


def test_bf16(tmp_path):
    trainer = make_trainer(tmp_path, steps=3, bf16=True, distill=0.5)
    trainer.train()
    plain = make_trainer(tmp_path / "b", steps=3, distill=0.5)
    plain.train()
    assert logged(trainer) == pytest.approx(logged(plain), rel=0.02)
    assert logged(trainer) != logged(plain)


def test_alpha_follows_the_schedule(tmp_path):
    trainer = make_trainer(tmp_path, alpha_start=1.0, alpha_end=8.0, alpha_schedule="linear")
    trainer.train()
    assert logged(trainer, "alpha") == pytest.approx([1 + 7 * i / 6 for i in range(6)])
    trainer.evaluate()
    assert trainer.pruned.alpha == 8.0
    half = make_trainer(tmp_path / "b", alpha_share=0.5, alpha_schedule="linear", alpha_start=2)
    half.train()
    assert logged(half, "alpha") == pytest.approx([2, 4, 6, 8, 8, 8])


def test_two_learning_rates(tmp_path):
    trainer = make_trainer(tmp_path, interaction_lr=0.02, base_lr=0.001, warmup=2, steps=3)
    before = weights(trainer)
    trainer.train()
    groups = {group["name"]: group for group in trainer.optimizer.param_groups}
    assert groups["interaction"]["lr"] == 0.02
    assert groups["base"]["lr"] == 0.001
    counted = sum(len(group["params"]) for group in trainer.optimizer.param_groups)
    assert counted == len(before)
    assert logged(trainer, "lr_interaction") == pytest.approx([0.01, 0.02, 0.02])
    assert logged(trainer, "lr_base") == pytest.approx([0.0005, 0.001, 0.001])
    after = weights(trainer)
    # Adam moves a weight by about its rate; the first step of the warm-up has the rate 0
    moved = {name: float((after[name] - before[name]).abs().max()) for name in before}
    for name, distance in moved.items():
        rate = 0.02 if ".interaction." in name else 0.001
        assert distance < 3 * rate, name
    assert moved["transformer.h.0.attn.interaction.query.weight"] > 0.01


@pytest.mark.parametrize("tune", ["all", "interaction", "lora"])
def test_trained_parameters(tmp_path, tune):
    trainer = make_trainer(tmp_path, tune=tune, distill=0.5)
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    expected = {
        "all": set(before),
        "interaction": {name for name in before if ".interaction." in name},
        "lora": {name for name in before if ".interaction." in name or ".lora_" in name},
    }[tune]
    assert changed == expected
    assert (trainer.teacher is not None) == (tune == "all")


@pytest.mark.parametrize("method", [DenseConfig(), LocalConfig(8), StridedConfig(4)])
def test_baselines(tmp_path, method):
    trainer = make_trainer(tmp_path, method=method)
    trainer.train()
    first, last = trainer.state.log_history[0], trainer.state.log_history[-2]
    assert first["loss"] == first["loss_language"]
    assert "alpha" not in first
    assert "loss_sparsity" not in first
    seen = {
        "dense": sum(range(32)),
        "local": sum(min(k, 7) for k in range(32)),
        "strided": sum(k // 4 + k % 4 for k in range(32)),
    }[method.method]
    want = 1 - seen / sum(range(32))
    assert first["sparsity_hard"] == pytest.approx(want, abs=1e-6)
    assert last["eval_sparsity_hard"] == pytest.approx(want, abs=1e-6)
    assert "eval_loss_soft" not in last
    trainer.save_model(str(tmp_path / "out"))
    again = kvprune.load(tmp_path / "out")
    assert again.config == method


def test_evaluation_is_soft_and_hard(tmp_path):
    trainer = make_trainer(tmp_path, alpha_start=1.0)
    numbers = trainer.evaluate()
    pruned, model = trainer.pruned, trainer.pruned.model
    ids = torch.tensor([row["input_ids"] for row in trainer.eval_dataset])
    for gate, hard in (("soft", False), ("hard", True)):
        pruned.hard = hard
        with torch.no_grad():
            loss = model(ids, labels=ids, use_cache=False).loss
        assert numbers[f"eval_loss_{gate}"] == pytest.approx(float(loss), rel=1e-5)
        assert numbers[f"eval_ppl_{gate}"] == pytest.approx(math.exp(float(loss)), rel=1e-4)
        share = pruned.sparsity()
        assert numbers[f"eval_sparsity_{gate}"] == pytest.approx(share.total, rel=1e-5)
        for layer in range(2):
            got = numbers[f"eval_sparsity_{gate}_layer_{layer}"]
            assert got == pytest.approx(float(share.per_layer[layer]), abs=1e-6)
    assert numbers["eval_loss"] == numbers["eval_loss_hard"]
    assert abs(numbers["eval_loss_soft"] - numbers["eval_loss_hard"]) > 0.01
    pruned.hard = None
    trainer.evaluate()
    assert pruned.hard is None


def test_evaluation_counts_tokens_not_batches(tmp_path):
    """Six rows in batches of four, some of them mostly padding."""
    trainer = make_trainer(tmp_path)
    data = make_rows(6, seed=3, padded=True)
    for row in data[4:]:
        row["labels"] = [-100] * 20 + row["labels"][20:]
    together = trainer.evaluate(data)
    each = [trainer.evaluate([row]) for row in data]
    counts = [sum(label != -100 for label in row["labels"][1:]) for row in data]
    mean = sum(e["eval_loss_hard"] * n for e, n in zip(each, counts, strict=True)) / sum(counts)
    assert together["eval_loss_hard"] == pytest.approx(mean, rel=1e-5)


def test_tensorboard_gets_every_metric(tmp_path):
    trainer = make_trainer(tmp_path, distill=0.5, arguments={"report_to": ["tensorboard"]})
    trainer.train()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = tmp_path.glob("runs/*/events*")
    read = EventAccumulator(str(events))
    read.Reload()
    tags = set(read.Tags()["scalars"])
    for name in (
        "loss", "loss_language", "loss_sparsity", "loss_kl", "loss_next_token", "alpha", "gamma",
        "sparsity_soft", "sparsity_hard", "sparsity_soft_layer_1", "sparsity_hard_layer_0",
        "tokens_per_second", "grad_norm", "lr_interaction", "lr_base",
    ):  # fmt: skip
        assert f"train/{name}" in tags
    for name in ("loss", "loss_soft", "ppl_soft", "ppl_hard", "sparsity_hard_layer_1"):
        assert f"eval/{name}" in tags


@pytest.mark.parametrize("bar", [True, False])
def test_console_output(tmp_path, capsys, bar):
    trainer = make_trainer(tmp_path, arguments={"disable_tqdm": not bar})
    trainer.train()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "step     6   loss " in shown.err
    assert "held out: perplexity soft " in shown.err
    assert "_layer_" not in shown.err
    assert ("6/6" in shown.err) == bar


def test_hard_sparsity_is_probed_on_the_evaluation_text(tmp_path):
    trainer = make_trainer(tmp_path, probe_rows=6, probe_every=3)
    trainer.train()
    entries = trainer.state.log_history
    assert "sparsity_hard" not in entries[0]
    (probed,) = [e["sparsity_hard"] for e in entries if e["step"] == 6 and "loss" in e]
    (evaluated,) = [e["eval_sparsity_hard"] for e in entries if e["step"] == 6 and "eval_loss" in e]
    assert probed == pytest.approx(evaluated, abs=1e-6)
    # afterwards the gate follows the model's mode again
    assert trainer.pruned.hard is None


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nan_stops_with_step_and_remedy(tmp_path, where, monkeypatch):
    trainer = make_trainer(tmp_path, save_every=1)
    original = type(trainer.pruned).keep_by_layer

    def poisoned(self):
        keep = original(self)
        if trainer.state.global_step < 4:
            return keep
        if where == "loss":
            return keep * float("nan")
        # finite, but its gradient is not
        return keep + (keep - keep.detach()).sqrt()

    monkeypatch.setattr(type(trainer.pruned), "keep_by_layer", poisoned)
    with pytest.raises(PruneError, match=r"stopped at step 4 .*lower interaction_lr") as caught:
        trainer.train()
    assert ("the loss is nan" if where == "loss" else "the gradient's norm is") in str(caught.value)
    assert "loss_sparsity" in str(caught.value) or where == "gradient"
    assert all(p.isfinite().all() for p in trainer.pruned.model.parameters())
    assert kvprune.train.last_whole_checkpoint(tmp_path).name == "checkpoint-4"


def test_invalid_settings():
    for settings, message in (
        ({"steps": 0}, "steps=0 must be a whole number"),
        ({"batch": True}, "batch=True"),
        ({"gamma": float("nan")}, "gamma=nan"),
        ({"distill": 1.5}, "0 to 1"),
        ({"alpha_start": 0.5}, "alpha=0.5"),
        ({"tune": "some"}, "tune='some' is unknown"),
        ({"method": kvprune.TovaConfig(8)}, "'tova' is not trained"),
        ({"method": DenseConfig(), "tune": "interaction"}, "train nothing"),
        ({"method": LocalConfig(4), "target_sparsity": 0.5}, "needs the method pruning"),
        ({"target_sparsity": 1.2}, "target_sparsity=1.2"),
        ({"target_sparsity": 0.5, "gamma": 0}, "gamma=0"),
    ):
        with pytest.raises(PruneError, match=message):
            TrainConfig(**settings)


def test_settings_round_trip():
    config = TrainConfig(method=LocalConfig(9), steps=7)
    assert TrainConfig.from_dict(config.to_dict()) == config
    with pytest.raises(PruneError, match="colour"):
        TrainConfig.from_dict({"colour": 1})


def test_target_needs_an_evaluation_text(tmp_path):
    with pytest.raises(PruneError, match="eval_dataset"):
        PruningTrainer(
            small_model(),
            make_config(target_sparsity=0.5),
            tmp_path,
            train_dataset=make_rows(4),
        )


def test_bad_start_is_reported(tmp_path, caplog):
    make_trainer(tmp_path, alpha_start=1.0)
    assert "broken" in caplog.text
    caplog.clear()
    make_trainer(tmp_path, alpha_start=1.5)
    assert caplog.text == ""


def test_training_continues_from_a_pruned_model(tmp_path):
    pruned = kvprune.attach(small_model(), PruningConfig(rank=8))
    trainer = make_trainer(tmp_path, model=pruned, steps=1)
    assert trainer.pruned is pruned
    trainer.train()
