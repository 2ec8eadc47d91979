"""A row that leaves as a snapshot and comes back goes on as if it had never left."""

import pytest
import torch

import kvprune
import zoo
from helpers import random_ids, uneven_gates
from kvprune import BudgetError, PrunedCache, PruneError, Snapshot
from kvprune.cache.arena import Arena
from kvprune.cache.layer import PrunedLayer
from kvprune.methods.h2o import H2OConfig

FAMILIES = ["gpt2", "llama", "gemma2"]
FORMS = [{}, {"store": "slots"}, {"kv": "int8"}, {"key_int": "int8"}]


def attached(name="llama", config=None, dtype=torch.float32):
    model = zoo.make(name).to(dtype).eval()
    pruned = kvprune.attach(model, config or kvprune.PruningConfig(rank=8, protect_recent=2))
    if config is None:
        uneven_gates(pruned)
    return pruned


def read(pruned, ids, cache, mask=None):
    positions = None
    if mask is not None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.inference_mode():
        return pruned.model(
            ids, past_key_values=cache, attention_mask=mask, position_ids=positions
        ).logits


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form.values()) or "extents")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_restored_row_goes_on_as_if_it_had_never_left(name, form, tmp_path):
    pruned, ids = attached(name), random_ids(1, 60)
    never_left, first = PrunedCache(pruned, **form), PrunedCache(pruned, **form)
    read(pruned, ids[:, :40], never_left)
    read(pruned, ids[:, :40], first)
    file = first.snapshot(0, about="a note").save(tmp_path / "row.safetensors")
    snapshot = Snapshot.load(file)
    assert snapshot.notes == {"about": "a note"}
    second = PrunedCache(pruned, **form)
    assert second.join(snapshot, snapshot) == [0, 1]
    assert second.kept.tolist() == first.kept.repeat(1, 2).tolist()
    assert (second.seen, second.tokens.tolist()) == (40, [40, 40])
    # a last bit that differs between batches of one and two may round to another int8
    noise = 2e-3 if "int8" in form.values() else 1e-5
    for t in range(40, 60):
        want = read(pruned, ids[:, t : t + 1], never_left)
        got = read(pruned, ids[:, t : t + 1].repeat(2, 1), second)
        torch.testing.assert_close(got, want.repeat(2, 1, 1), atol=noise, rtol=noise)
    assert second.kept.tolist() == never_left.kept.repeat(1, 2).tolist()


@pytest.mark.parametrize("config", [None, H2OConfig(budget=12)], ids=["votes", "h2o"])
@pytest.mark.parametrize("store", ["extents", "slots"])
def test_rows_of_all_ages_side_by_side(config, store):
    """Rows join and leave; each gets what it would get alone."""
    pruned, texts = attached(config=config), random_ids(5, 70)
    starts, lengths = [10, 33, 21, 40, 28], [10, 33, 21, 40, 28]
    alone = [PrunedCache(pruned, store=store) for _ in starts]
    for row, cache in enumerate(alone):
        read(pruned, texts[row : row + 1, : starts[row]], cache)
    cache, order = PrunedCache(pruned, store=store), []
    plan = {
        0: ("join", [0, 1]),
        4: ("join", [2]),
        8: ("leave", 1),
        12: ("join", [3, 4]),
        18: ("leave", 0),
    }
    for step in range(25):
        what, who = plan.get(step, ("", None))
        if what == "join":
            cache.join(*(alone[row].snapshot() for row in who))
            order += who
        elif what == "leave":
            cache.leave(order.index(who))
            order.remove(who)
        new = torch.stack([texts[row, lengths[row] : lengths[row] + 1] for row in order])
        got = read(pruned, new, cache, cache.attention_mask(1))
        for i, row in enumerate(order):
            want = read(pruned, new[i : i + 1], alone[row])
            torch.testing.assert_close(got[i : i + 1], want, atol=1e-5, rtol=1e-5)
            lengths[row] += 1
        # a row that is not in the batch waits
        assert cache.tokens.tolist() == [lengths[row] for row in order]
        kept = [alone[row].kept[:, 0].tolist() for row in order]
        assert cache.kept.T.tolist() == kept


def test_a_join_or_leave_moves_no_other_row():
    pruned = attached()
    arena = Arena()
    cache = PrunedCache(pruned, arena=arena)
    read(pruned, random_ids(64, 30), cache)
    snapshot = cache.snapshot(5)
    before = [store.table.offsets() for store in cache.stores]
    cache.join(snapshot)
    after = [store.table.offsets() for store in cache.stores]
    assert [rows[:-1] for rows in after] == before
    cache.leave(10, 64)
    left = [store.table.offsets() for store in cache.stores]
    assert left == [rows[:10] + rows[11:] for rows in before]


def test_rows_join_where_the_model_is(monkeypatch):
    """Not where their file was read, which is the CPU."""
    pruned, asked = attached(), []
    cache = PrunedCache(pruned)
    read(pruned, random_ids(1, 9), cache)
    snapshot = cache.snapshot()
    monkeypatch.setattr(kvprune.Pruned, "device", torch.device("meta"))

    def begin(layer, key, value):
        asked.append((key.device.type, value.device.type))
        raise StopIteration

    monkeypatch.setattr(PrunedLayer, "begin", begin)
    with pytest.raises(StopIteration):
        PrunedCache(pruned).join(snapshot)
    assert asked == [("meta", "meta")]


def test_a_record_goes_along():
    pruned, ids = attached(), random_ids(1, 50)
    whole, first = PrunedCache(pruned, record=True), PrunedCache(pruned, record=True)
    read(pruned, ids, whole)
    read(pruned, ids[:, :30], first)
    second = PrunedCache(pruned, record=True)
    second.join(first.snapshot())
    read(pruned, ids[:, 30:], second)
    assert second.drop_step.equal(whole.drop_step)
    plain = PrunedCache(pruned)
    read(pruned, ids, plain)
    with pytest.raises(PruneError, match="without a record"):
        second.join(plain.snapshot())


def test_other_models_settings_and_forms_refuse_it(tmp_path):
    pruned, ids = attached(), random_ids(1, 20)
    cache = PrunedCache(pruned)
    read(pruned, ids, cache)
    file = cache.snapshot().save(tmp_path / "row.safetensors")
    snapshot = Snapshot.load(file)
    with pytest.raises(PruneError, match="kv"):
        PrunedCache(pruned, kv="int8").join(snapshot)
    pruned.adjust(threshold=0.5)
    with pytest.raises(PruneError, match=r"method.threshold \(0.0, here 0.5\)"):
        PrunedCache(pruned).join(snapshot)
    pruned.adjust(threshold=0.0, protect_recent=3)
    with pytest.raises(PruneError, match=r"method\.protect_recent"):
        PrunedCache(pruned).join(snapshot)
    pruned.adjust(protect_recent=2)
    with torch.no_grad():
        pruned.interactions[1].key.weight[0, 0] += 1
    with pytest.raises(PruneError, match="adapter"):
        PrunedCache(pruned).join(snapshot)
    with torch.no_grad():
        pruned.interactions[1].key.weight[0, 0] -= 1
        pruned.model.get_input_embeddings().weight[0, 0] += 1
    with pytest.raises(PruneError, match="model"):
        PrunedCache(pruned).join(snapshot)


def test_damaged_files_are_refused(tmp_path):
    pruned = attached()
    cache = PrunedCache(pruned)
    read(pruned, random_ids(1, 20), cache)
    file = cache.snapshot().save(tmp_path / "row.safetensors")
    data = file.read_bytes()
    for damaged in (data[:100], data[:-10], b"", b"x" * 200):
        file.write_bytes(damaged)
        with pytest.raises(PruneError, match=r"damaged|format"):
            Snapshot.load(file)
    with pytest.raises(PruneError, match="there is no snapshot"):
        Snapshot.load(tmp_path / "nothing")
    with pytest.raises(PruneError, match="no folder"):
        cache.snapshot().save(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with pytest.raises(TypeError):
        cache.snapshot(0, bad=object()).save(file)
    assert file.read_bytes() == b"x" * 200


def test_a_mask_that_forgets_the_pads_is_refused():
    pruned = attached()
    young, cache = PrunedCache(pruned), PrunedCache(pruned)
    read(pruned, random_ids(1, 10), young)
    read(pruned, random_ids(1, 30), cache)
    cache.join(young.snapshot())
    with pytest.raises(PruneError, match=r"\[30, 10\] tokens.*attention_mask"):
        read(pruned, random_ids(2, 1), cache)
    assert cache.attention_mask(2).sum(1).tolist() == [32, 12]


def test_rows_that_do_not_exist():
    pruned = attached()
    cache = PrunedCache(pruned)
    read(pruned, random_ids(2, 10), cache)
    with pytest.raises(PruneError, match="row 2 does not exist"):
        cache.snapshot(2)
    with pytest.raises(PruneError, match=r"rows \[7\] do not exist"):
        cache.leave(7)
    cache.leave(0, 1)
    assert cache.tokens.tolist() == []
    assert cache.storage.arena.held == 0


def test_a_join_beyond_the_budget_changes_nothing():
    pruned, ids = attached(), random_ids(1, 60)
    free = PrunedCache(pruned)
    read(pruned, ids, free)
    snapshot = free.snapshot()
    cache = PrunedCache(pruned, budget=int(free.nbytes * 2.5))
    cache.join(snapshot, snapshot)
    before = cache.kept.tolist(), cache.tokens.tolist()
    with pytest.raises(BudgetError) as raised:
        cache.join(snapshot)
    assert raised.value.allowed == cache.storage.arena.budget
    assert raised.value.asked + raised.value.held > raised.value.allowed
    assert (cache.kept.tolist(), cache.tokens.tolist()) == before
    assert cache.nbytes <= raised.value.allowed
    cache.storage.arena.budget = None
    read(pruned, random_ids(2, 1), cache)
