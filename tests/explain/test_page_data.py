"""What a page holds: packed arrays against plain values, scores within their stated error."""

import json

import numpy as np
import pytest

import page_traces
import traces
from kvprune import NEVER, PruneError
from kvprune.explain.page import BUDGET, budget, page_data, render_page
from kvprune.explain.page.factors import error, fit, page_scores, size, spectrum
from kvprune.explain.page.packing import MISSING, pack, pack_steps, quantise, unpack
from kvprune.explain.votes import Votes


def embedded(page):
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32"])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 7), (2, 5, 3)])
def test_unpack_is_the_way_back(dtype, shape):
    about = np.iinfo(dtype)
    values = np.random.default_rng(0).integers(about.min, about.max, shape, dtype=dtype)
    for huffman in (False, True):
        back = unpack(pack(values, huffman))
        assert back.dtype == dtype
        assert np.array_equal(back, values)


def test_floats_are_not_packed_as_they_are():
    with pytest.raises(TypeError, match="float32"):
        pack(np.zeros(3, np.float32))


def test_quantised_numbers_are_within_half_a_step():
    values = np.random.default_rng(0).normal(size=500).astype(np.float32)
    values[7] = np.nan
    packed = quantise(values, 0.02)
    back = unpack(packed) * packed["step"]
    assert unpack(packed)[7] == MISSING
    assert np.abs(np.delete(back - values, 7)).max() <= 0.01 + 1e-6
    # numbers that need more than 16 bits get a wider step
    wide = quantise(values * 1e6, 0.02)
    assert np.nanmax(np.abs(values)) * 1e6 / 32767 == pytest.approx(wide["step"])
    assert np.delete(unpack(wide) != MISSING, 7).all()


def test_steps_are_packed_as_distances():
    steps = np.array([[3, NEVER, 9], [70_000, 5, NEVER]])
    start = np.arange(3)
    packed = pack_steps(steps, start, NEVER)
    assert unpack(packed).tolist() == [[3, 0, 7], [70_000, 4, 0]]
    assert packed["type"] == "uint32"
    assert pack_steps(steps[:1], start, NEVER)["type"] == "uint16"


def test_page_data_holds_the_trace():
    trace = page_traces.costly_trace()
    data = page_data(trace)
    (record,) = data["records"]
    life = unpack(record["drop"])
    assert np.array_equal(np.where(life > 0, np.arange(60) + life, NEVER), trace.drop_step)
    for name, values in (("score", trace.score), ("runner_score", trace.runner_scores),
                         ("loss", trace.loss), ("dense_loss", trace.dense_loss)):  # fmt: skip
        whole = unpack(record[name])
        back = np.where(whole == MISSING, np.nan, whole * record[name]["step"])
        np.testing.assert_allclose(back, values, atol=record[name]["step"])
    gap = unpack(record["runner_gap"])
    step = np.where(gap > 0, trace.drop_step[..., None] + np.cumsum(gap, -1), NEVER)
    assert np.array_equal(step, trace.runner_steps)
    assert (gap > 0).any()
    assert record["settings"] == {"threshold": 0.0, "protect_first": 0, "protect_recent": 4,
                                  "depth_tied": False}  # fmt: skip
    assert record["method"] == "pruning"
    assert record["adapter"] == "adapter-80"
    worst = record["misses"][0]
    assert worst["token"] == 40
    assert (worst["loss"], worst["dense_loss"], worst["open_loss"]) == (5.0, 2.0, 2.1)
    assert [miss["returns"] is None for miss in record["misses"]] == [False] * 3 + [True] * 9
    assert worst["returns"][0] == [20, None, round(float(trace.loss[40]) - 1.25, 3)]
    assert worst["returns"][1][1] == 1


def random_votes(L=3, T=200, R=8, seed=0):
    rng = np.random.default_rng(seed)
    strength = 2.0 ** -np.arange(R)
    q_int = (rng.normal(size=(L, T, R)) * strength).astype(np.float32)
    k_int = (rng.normal(size=(L, T, R)) * strength).astype(np.float32)
    return Votes(q_int, k_int, np.array([1.0, 2.0, -1.0][:L]))


def test_spectrum_is_the_product():
    votes = random_votes()
    parts = spectrum(votes.q_int[0], votes.k_int[0])
    product = (parts.query * parts.gain[:, None]).T @ parts.key
    np.testing.assert_allclose(product, votes.q_int[0] @ votes.k_int[0].T, atol=1e-5)
    assert (np.diff(parts.gain) <= 0).all()


def test_scores_are_within_their_stated_error():
    votes = random_votes()
    tables = np.stack([votes.table(layer) for layer in range(3)])
    later = np.isfinite(tables)
    last = 0.0
    for room in (10**6, 4_000, 3_000, 1_500):
        factors = fit(votes, room)
        assert size(factors) <= room
        shown = np.stack([factors.scores(layer, votes.beta[layer]) for layer in range(3)])
        difference = (shown - tables)[later]
        rms, largest = error(votes, factors)
        assert rms == pytest.approx(np.sqrt((difference**2).mean()), rel=1e-4)
        assert largest == pytest.approx(np.abs(difference).max(), rel=1e-4)
        # fewer bytes, more noise
        assert rms > last
        last = rms
    # with room enough the noise is invisible
    assert error(votes, fit(votes, 10**6))[0] < 0.025 * tables[later].std()
    # and at a sixth of the bytes the curve still follows the scores
    assert last < 0.5 * tables[later].std()


def test_noise_is_spread_better_than_by_equal_steps():
    """Equal steps for all parts, the obvious way, cost more bytes for the same error."""
    votes = random_votes(L=1)
    factors = fit(votes, room := 1_200)
    rms = error(votes, factors)[0]
    parts = spectrum(votes.q_int[0], votes.k_int[0])
    scale = np.sqrt(parts.gain)[:, None]
    for step in np.geomspace(0.01, 1, 200):
        query, key = np.round(parts.query * scale / step), np.round(parts.key * scale / step)
        bytes_ = [len(pack(each.astype(np.int16), huffman=True)["data"]) for each in (query, key)]
        if sum(bytes_) <= room:
            break
    shown = (query * step).T @ (key * step)
    earlier = np.tri(200, k=-1, dtype=bool)
    difference = (shown - votes.q_int[0] @ votes.k_int[0].T)[earlier]
    assert rms < 0.8 * np.sqrt((difference**2).mean())


def test_too_small_a_budget_gives_no_scores():
    votes = random_votes()
    assert page_scores(votes, 100) is None
    assert page_scores(Votes(votes.q_int * 0, votes.k_int, votes.beta), 10**6) is None


def test_long_texts_stay_under_a_megabyte_and_a_half():
    """2,000 tokens × 30 layers, with scores of rank 32 that do not compress."""
    trace = long_trace()
    page = render_page(trace)
    assert len(page.encode()) <= BUDGET + 500 < 1_500_000
    scores = embedded(page)["records"][0]["scores"]
    spread = float(np.std([trace.scores(500, layer)[501:] for layer in range(30)]))
    assert scores["rms"] < 0.6 * spread


def long_trace(T=2000, L=30, R=32):
    """Scores like those of a trained model: few strong parts, many weak ones."""
    rng = np.random.default_rng(0)
    strength = 1.5 * np.arange(1, R + 1) ** -0.5
    q_int, k_int = (rng.normal(size=(2, L, T, R)) * np.sqrt(strength)).astype(np.float32)
    votes = Votes(q_int, k_int, rng.uniform(3, 6, L), 0.0, 0, 16)
    step = np.full((L, T), NEVER)
    far = np.tri(T, k=-17, dtype=bool)
    for layer in range(L):
        drops = far & (q_int[layer] @ k_int[layer].T + votes.beta[layer] <= 0)
        step[layer] = np.where(drops.any(0), drops.argmax(0), NEVER)
    plain = traces.random_trace(L, T)
    loss = rng.gamma(2, 1.5, (2, T)).astype(np.float32)
    return plain.__class__(
        tokens=plain.tokens, ids=plain.ids, drop_step=step, layers=plain.layers, prompt=T,
        kept_bytes=100, dense_bytes=90, model="base", adapter="adapter-80", votes=votes,
        settings={"method": "pruning", "threshold": 0.0, "protect_recent": 16},
        loss=loss[0], dense_loss=loss[1], dense="base model",
    )  # fmt: skip


def test_longer_texts_get_larger_pages():
    assert budget(traces.random_trace(2, 20)) == budget(traces.random_trace(30, 2000)) == BUDGET
    assert budget(traces.random_trace(30, 6000)) == 3 * BUDGET


def test_names_of_two_traces():
    one = page_traces.voting_trace()
    other = page_traces.voting_trace(name="adapter-70")
    higher = page_traces.voting_trace(threshold=0.5)

    def names(against):
        return [record["name"] for record in page_data(one, against)["records"]]

    assert names(other) == ["adapter-80", "adapter-70"]
    assert names(higher) == ["adapter-80, threshold 0", "adapter-80, threshold 0.5"]
    assert names(one) == ["adapter-80 (A)", "adapter-80 (B)"]


def test_two_traces_must_fit():
    trace = page_traces.voting_trace()
    shorter = page_traces.voting_trace(T=50)
    with pytest.raises(PruneError, match=r"60 and 50 tokens, different from token 50 on"):
        page_data(trace, shorter)
    with pytest.raises(PruneError, match="different layers"):
        page_data(trace, page_traces.voting_trace(L=2))


def test_plain_traces_have_a_page():
    """Format 1, or a method without votes."""
    data = embedded(render_page(traces.random_trace(2, 20)))
    assert "score" not in data["records"][0]
    assert "scores" not in data["records"][0]
    assert "loss" not in data["records"][0]


def test_a_failed_page_leaves_nothing_behind(tmp_path):
    trace = page_traces.voting_trace()
    with pytest.raises(PruneError, match="different texts"):
        trace.to_html(tmp_path / "new" / "page.html", against=page_traces.voting_trace(T=50))
    assert list(tmp_path.iterdir()) == []
