"""Perplexity by context size, against a model that reads every prefix separately."""

import math

import pytest
import torch
from torch import Tensor

import kvprune
import zoo
from helpers import random_ids, uneven_gates
from kvprune import PruneError
from kvprune.evaluate.perplexity.measure import perplexity
from kvprune.evaluate.points import Points
from kvprune.evaluate.reader import Reader, dropped_by
from kvprune.ops.timeline import NEVER
from kvprune.text.windows import IGNORE, cut, sizes

CONFIGS = {
    "pruning": kvprune.PruningConfig(rank=8),
    "tied": kvprune.PruningConfig(rank=8, depth_tied=True),
    "dense": kvprune.DenseConfig(),
    "local": kvprune.LocalConfig(window=5),
    "strided": kvprune.StridedConfig(stride=4),
    "streaming": kvprune.StreamingConfig(budget=6, sinks=2),
    "tova": kvprune.TovaConfig(budget=5),
    "h2o": kvprune.H2OConfig(budget=6),
}


def attached(config: str = "pruning", family: str = "gpt2", **overrides) -> kvprune.Pruned:
    pruned = kvprune.attach(zoo.make(family, **overrides), CONFIGS[config])
    uneven_gates(pruned)
    return pruned


class Prefix:
    """Metrics after one prefix, the slow way: one pass per token."""

    def __init__(self, pruned: kvprune.Pruned, ids: Tensor, target: int):
        self.n = n = len(ids)
        with torch.no_grad(), pruned.evaluating():
            log_p = pruned.model(ids[None]).logits[0, -1].double().log_softmax(-1)
            with pruned.dense():
                log_q = pruned.model(ids[None]).logits[0, -1].double().log_softmax(-1)
        steps = pruned.trace(ids)[:, 0]  # (L, n)
        self.loss, self.dense_loss = -float(log_p[target]), -float(log_q[target])
        self.kl = float((log_q.exp() * (log_q - log_p)).sum())
        self.same = float(log_p.argmax() == log_q.argmax())
        self.gone = [sum(int(step) <= n - 1 for step in layer[: n - 1]) for layer in steps]


def assert_same(rows, want, **tolerance) -> None:
    for row, other in zip(rows, want, strict=True):
        a, b = row.to_dict(), other.to_dict()
        assert a.pop("context") == b.pop("context")
        assert a == pytest.approx(b, **tolerance)


def mean(values) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("config", CONFIGS)
def test_equals_reading_every_prefix(config):
    pruned, ids = attached(config), random_ids(1, 25)[0]
    rows = perplexity(pruned, ids, [1, 3, 7, 12], length=12, dense="open", batch=1)
    prefixes = {
        n: [Prefix(pruned, ids[s : s + n], int(ids[s + n])) for s in (0, 12)] for n in range(1, 13)
    }
    for row, (before, n) in zip(rows, [(0, 1), (1, 3), (3, 7), (7, 12), (0, 12)], strict=True):
        inside = [prefix for k in range(before + 1, n + 1) for prefix in prefixes[k]]
        assert row.context == ("all" if row is rows[-1] else n)
        assert row.tokens == len(inside)
        assert row.loss == pytest.approx(mean(p.loss for p in inside), abs=1e-5)
        assert row.perplexity == pytest.approx(math.exp(row.loss))
        dense = math.exp(mean(p.dense_loss for p in inside))
        assert row.dense_perplexity == pytest.approx(dense, rel=1e-5)
        assert row.kl == pytest.approx(mean(p.kl for p in inside), abs=1e-5)
        assert row.same == pytest.approx(mean(p.same for p in inside))
        at = inside if row is rows[-1] else prefixes[n]
        pairs = sum(k - 1 for k in range(1, n + 1)) if row is rows[-1] else n - 1
        want = sum(mean(p.gone) for p in at) / (2 * pairs) if pairs else 0.0
        assert row.sparsity == pytest.approx(want)
        # of the tokens that were scored, by position; the first has nothing to drop
        want = mean(mean(p.gone) / max(p.n - 1, 1) for p in inside)
        assert row.sparsity_scored == pytest.approx(want)
    assert (rows[-1].sparsity > 0.05) == (config != "dense")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 7])
def test_the_cached_path_agrees(config, chunk):
    pruned, ids = attached(config, "llama"), random_ids(3, 23)
    full = perplexity(pruned, ids, dense="open", batch=2)
    cached = perplexity(pruned, ids, dense="open", batch=2, path="cached", chunk=chunk)
    assert_same(cached, full, rel=1e-5, abs=1e-5)


def test_a_method_that_cuts_prompts_reads_in_chunks():
    pruned = kvprune.attach(zoo.make("llama"), kvprune.SnapKVConfig(budget=8, window=3))
    ids = random_ids(2, 40)
    with pytest.raises(PruneError, match="snapkv drops at the end of what it reads"):
        perplexity(pruned, ids)
    row = perplexity(pruned, ids, [40], path="cached", chunk=10, progress=False)[0]
    # the last token sees 8 of the 30 before its chunk, and 9 of its own
    assert row.sparsity == pytest.approx(22 / 39)


def test_an_untouched_model_is_dense():
    model, ids = zoo.make("llama"), random_ids(2, 40)
    model.train()
    want = perplexity(attached("dense", "llama"), ids, progress=False)
    with torch.no_grad():
        loss = zoo.make("llama")(ids, labels=ids).loss
    for path in ("full", "cached"):
        rows = perplexity(model, ids, path=path, chunk=9)
        assert_same(rows, want, rel=1e-5)
        assert rows[-1].loss == pytest.approx(float(loss), rel=1e-5)
        assert {row.sparsity for row in rows} == {0.0}
        assert "kl" not in rows[0].to_dict()
    assert model.training
    assert all(module.training for module in model.modules())


def test_another_dense_model():
    other = zoo.make("gpt2", seed=3)
    rows = perplexity(attached(), random_ids(2, 40), dense=other)
    alone = perplexity(other, random_ids(2, 40))
    for row, want in zip(rows, alone, strict=True):
        assert row.dense_perplexity == pytest.approx(want.perplexity)
    assert rows[-1].dense_perplexity != pytest.approx(rows[-1].perplexity)


def test_windows_are_consecutive_and_predict_each_token_once():
    windows = cut(torch.arange(10), 3)
    assert windows.ids.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert windows.targets.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert cut(torch.arange(9), 3).targets[-1].tolist() == [7, 8, IGNORE]
    assert cut(torch.arange(10), 3, limit=2).targets.tolist() == [[1, 2, 3], [4, 5, 6]]
    rows = cut(torch.arange(6).view(2, 3))
    assert rows.targets.tolist() == [[1, 2, IGNORE], [4, 5, IGNORE]]
    assert rows.first == 0


def test_strided_windows_count_only_what_is_new():
    windows = cut(torch.arange(12), 5, stride=2)
    assert windows.ids.tolist() == [[s, s + 1, s + 2, s + 3, s + 4] for s in (0, 2, 4, 6)]
    counted = windows.targets[:, windows.first :]
    assert counted.flatten().tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    pruned, ids = attached(), random_ids(1, 41)[0]
    rows = perplexity(pruned, ids, length=20, stride=5, max_windows=3)
    assert [row.context for row in rows] == [16, 20, "all"]
    prefixes = {
        n: [Prefix(pruned, ids[s : s + n], int(ids[s + n])) for s in (0, 5, 10)]
        for n in range(16, 21)
    }
    assert rows[-1].tokens == 15
    assert rows[-1].loss == pytest.approx(mean(p.loss for k in prefixes.values() for p in k))
    gone = sum(mean(p.gone) for k in prefixes.values() for p in k)
    assert rows[-1].sparsity == pytest.approx(gone / (3 * sum(range(15, 20))))
    assert rows[0].sparsity == pytest.approx(mean(mean(p.gone) / 15 for p in prefixes[16]))


def test_the_dense_model_reads_once_for_several_methods():
    ids, logits = random_ids(1, 41)[0], {}
    options = {"length": 20, "stride": 5, "batch": 2, "dense": "open"}
    want = {name: perplexity(attached(name), ids, **options) for name in ("pruning", "tova")}
    passes = []
    for name, alone in want.items():
        pruned = attached(name)
        pruned.model.register_forward_hook(lambda *_: passes.append(1))
        assert_same(perplexity(pruned, ids, dense_logits=logits, **options), alone)
    # five windows are three batches: dense once, each method once
    assert len(passes) == 3 * 3
    assert sum(part.shape[1] for parts in logits.values() for part in parts) == 3 * 5


def test_a_model_without_logits_to_keep(monkeypatch):
    ids, options = random_ids(1, 41)[0], {"length": 20, "stride": 5, "dense": "open"}
    want = perplexity(attached(), ids, **options)
    monkeypatch.setattr(Reader, "can_skip", False)
    assert_same(perplexity(attached(), ids, **options), want, rel=1e-6)


def test_context_sizes_double_up_to_the_length():
    assert sizes(1) == [1]
    assert sizes(8) == [1, 2, 4, 8]
    assert sizes(9) == [1, 2, 4, 8, 9]
    assert sizes(9, first=4) == [8, 9]
    # nothing follows the ninth token of a row
    assert [row.context for row in perplexity(attached(), random_ids(3, 9))] == [1, 2, 4, 8, "all"]


def test_dropped_counts_each_token_that_is_gone():
    steps = torch.randint(1, 9, (2, 3, 7), generator=torch.Generator().manual_seed(0))
    steps = (steps + torch.arange(7)).where(steps < 7, NEVER)
    for l in range(2):
        for b in range(3):
            for k in range(7):
                gone = sum(int(steps[l, b, j]) <= k for j in range(7))
                assert dropped_by(steps)[l, b, k] == gone


def test_an_interrupted_run_resumes(tmp_path):
    pruned, ids = attached(), random_ids(5, 24)
    full = perplexity(pruned, ids, batch=2)

    class Stops(Points):
        def measure(self, setting, rows):
            if setting["windows"][0] == 4:
                raise KeyboardInterrupt
            return super().measure(setting, rows)

    with pytest.raises(KeyboardInterrupt):
        perplexity(pruned, ids, batch=2, points=Stops(tmp_path / "p.json"))
    for (
        layer
    ) in pruned.layers:  # finished windows must not be measured again: they would differ now
        layer.interaction.beta.data.fill_(100)
    done = perplexity(pruned, ids[:4], batch=2, points=Points(tmp_path / "p.json"))
    assert done == perplexity(attached(), ids[:4], batch=2)
    assert done != full
    # another text is measured, not taken from the file
    other = perplexity(pruned, ids[:4] - 1, batch=2, points=Points(tmp_path / "p.json"))
    assert other == perplexity(pruned, ids[:4] - 1, batch=2)


def test_bad_input_is_explained():
    pruned, ids = attached(), random_ids(1, 41)[0]

    def fails(match, *args, of=pruned, text=ids, **options):
        with pytest.raises(PruneError, match=match):
            perplexity(of, text, *args, **options)

    fails("the text has 41 tokens, fewer than the 64 of one window", length=64)
    fails("length=None must be a whole number")
    fails("stride=21 must be from 1 to the length of a window, 20", length=20, stride=21)
    fails("the text is windows of 41 tokens already", text=ids[None], length=20)
    fails("whole numbers", text=ids.float(), length=20)
    fails("0 windows are too few", length=20, max_windows=0)
    fails("hold nothing to predict", text=ids[:, None])
    fails("context of 21 tokens; windows of 20 tokens have contexts of 1 to 20", [21], length=20)
    fails("contexts of 16 to 20", [8], length=20, stride=5)
    fails("context of 41 tokens, the last of the text", [40, 41], text=ids[None])
    fails("windows of 600 tokens do not fit into the 512 positions", text=random_ids(1, 600))
    fails("token 500, the model knows 101", text=torch.tensor([[1, 500]]))
    fails("path='fast' is unknown", length=20, path="fast")
    fails("chunk=0 must be", length=20, path="cached", chunk=0)
    fails("batch=0 must be", length=20, batch=0)
    fails("has pruning attached; pass the Pruned", of=pruned.model, length=20)
    fails("dense='open': pass a model", of=zoo.make("gpt2"), length=20, dense="open")
    fails("knows 101 tokens and the pruned one 90", of=attached(vocab_size=90), text=ids % 90,
          length=20, dense=zoo.make("gpt2"))  # fmt: skip
    with torch.no_grad():
        pruned.model.transformer.wte.weight[5] = torch.nan
    fails("predicts NaN or Inf", length=20)
