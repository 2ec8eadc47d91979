"""What a request gets does not depend on who is beside it, nor on how little memory there is."""

import random
from dataclasses import replace

import pytest
from engines import GREEDY, alone, core, prompt, pruned_model, serve

from kvprune import DenseConfig, H2OConfig, SnapKVConfig
from kvprune.errors import BudgetError
from kvprune.serve.request import Request, Sampling, Settings

# too little for three rows of the longest texts
BUDGET = 55_000


def requests(count, seed=0, longest=60, **options):
    draw = random.Random(seed)
    return [
        (
            draw.randrange(20),
            Request(
                f"r{i}",
                prompt(draw.randrange(1, longest), 100 * seed + i),
                draw.randrange(1, 40),
                GREEDY,
                **options,
            ),
        )
        for i in range(count)
    ]


def check(clients, pruned):
    for client in clients:
        want = alone(pruned, client.request)
        assert client.tokens() == want
        assert client.text() == "".join(f" w{token}" for token in want)
        assert client.finish() == "length"
        usage = client.of()[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            len(client.request.prompt),
            len(want),
        )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("chunk", [3, 512])
def test_random_arrivals(family, chunk):
    pruned = pruned_model(family)
    engine = core(pruned, chunk=chunk, max_rows=5 if chunk == 3 else 64)
    check(serve(engine, requests(16)), pruned)
    assert engine.runner.arena.used == 0


@pytest.mark.parametrize("parked", [0, 10_000_000], ids=["read again", "snapshots"])
@pytest.mark.parametrize("admission", ["optimistic", "forecast", "worst"])
def test_little_memory(parked, admission):
    pruned = pruned_model()
    engine = core(pruned, BUDGET, parked, chunk=8, max_rows=8, admission=admission)

    def within(core, step):
        assert core.runner.arena.held <= BUDGET

    clients = serve(engine, requests(16, seed=1), after=within)
    check(clients, pruned)
    assert engine.runner.arena.used == 0
    assert engine._parked == 0
    assert engine.counters["read_again"] == 0
    if admission == "worst":
        assert engine.counters["preemptions"] == 0
    if admission == "optimistic":
        assert engine.counters["preemptions"] > 2


@pytest.mark.parametrize(
    "config", [DenseConfig(), H2OConfig(budget=9), SnapKVConfig(budget=12, window=4)]
)
def test_every_kind_of_method(config):
    pruned = pruned_model(config=config)
    check(serve(core(pruned, chunk=8, max_rows=6), requests(8)), pruned)


def test_int8_rows_are_as_alone():
    pruned = pruned_model()
    arrivals = requests(8)
    together = serve(core(pruned, kv="int8", chunk=16), arrivals)
    for client in together:
        (single,) = serve(core(pruned, kv="int8"), [(0, client.request)])
        assert client.tokens() == single.tokens()


def test_settings_of_a_request():
    pruned = pruned_model()
    text = prompt(50, 3)
    plain = Request("a", text, 12, GREEDY)
    open_gates = Request("b", text, 12, GREEDY, settings=Settings(threshold=-1e9))
    recent = Request("c", text, 12, GREEDY, settings=Settings(protect_recent=30))
    a, b, c = serve(core(pruned), [(0, plain), (0, open_gates), (1, recent)])
    assert a.tokens() == alone(pruned, plain)
    pruned.adjust(threshold=-1e9)
    assert b.tokens() == alone(pruned, open_gates) != a.tokens()
    pruned.adjust(threshold=0.0, protect_recent=30)
    assert c.tokens() == alone(pruned, recent)


def test_a_seed_gives_the_same_tokens_whoever_is_beside():
    pruned = pruned_model()
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=7)
    request = Request("s", prompt(20, 5), 15, sampling, n=3)
    (single,) = serve(core(pruned), [(0, request)])
    beside = serve(core(pruned, chunk=8, max_rows=4), [(0, request), *requests(6)])
    client = next(client for client in beside if client.request.id == "s")
    for index in range(3):
        assert client.tokens(index) == single.tokens(index)
        assert len(single.tokens(index)) == 15
    assert len({tuple(single.tokens(index)) for index in range(3)}) == 3


def test_cancel_in_every_state():
    pruned = pruned_model()
    arrivals = [*requests(10, seed=4), (0, Request("many", prompt(40, 1), 10, GREEDY, n=4))]
    draw = random.Random(0)

    def cancel(core, step):
        if core.requests and draw.random() < 0.155:
            core.end_all(draw.choice(list(core.requests)), "cancelled")

    engine = core(pruned, BUDGET, chunk=8, max_rows=8, admission="optimistic")
    clients = serve(engine, arrivals, after=cancel)
    for client in clients:
        want = alone(pruned, client.request)
        for index in range(client.request.n):
            finish, tokens = client.finish(index), client.tokens(index)
            assert finish in ("cancelled", "length")
            assert tokens == want[: len(tokens)]
    assert engine.counters["requests_cancelled"] > 2
    assert engine.runner.arena.used == engine._parked == 0
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting


def test_a_row_that_cannot_come_back_yet(monkeypatch):
    pruned = pruned_model()
    engine = core(pruned, BUDGET, 10_000_000, chunk=8, max_rows=8, admission="optimistic")
    enter, refused = engine.runner.enter, []

    def sometimes(row):
        if row.snapshot is not None and len(refused) < 5:
            refused.append(row)
            raise BudgetError(asked=1, held=1, allowed=1)
        enter(row)

    monkeypatch.setattr(engine.runner, "enter", sometimes)
    check(serve(engine, requests(16, seed=1)), pruned)
    assert len(refused) == 5
    assert engine.runner.arena.used == engine._parked == 0


def test_prefixes_are_found_again():
    pruned = pruned_model()
    system, first, second = prompt(40, 1), prompt(20, 2), prompt(10, 3)
    engine = core(pruned)
    one = Request("1", system + first, 8, GREEDY, boundaries=(40,))
    (client,) = serve(engine, [(0, one)])
    assert client.of()[-1].usage.cached_tokens == 0
    # the next turn goes on from the reply, whose last token was never read
    reply = tuple(client.tokens())
    two = Request("2", system + first + reply + second, 8, GREEDY)
    other = Request("3", system + second, 8, GREEDY)
    salted = Request("4", system + second, 8, GREEDY, salt="x")
    clients = serve(engine, [(0, two), (0, other), (0, salted)])
    cached = [client.of()[-1].usage.cached_tokens for client in clients]
    assert cached == [40 + 20 + 8 - 1, 40, 0]
    check(clients, pruned)


def test_logprobs_of_prompt_and_answer():
    pruned = pruned_model()
    text = prompt(30, 9)
    request = Request("l", text, 4, GREEDY, logprobs=3, prompt_logprobs=2)
    (client,) = serve(core(pruned, chunk=7, max_rows=7), [(0, request)])
    (logs,) = [event.prompt for event in client.events if event.prompt]
    assert [token.id for token in logs] == list(text)
    assert logs[0].logprob is None
    import torch

    with torch.inference_mode():
        ids = torch.tensor([[*text, *client.tokens()]])
        want = pruned.model(ids).logits[0].log_softmax(-1)
    for t, token in enumerate(logs[1:]):
        assert token.logprob == pytest.approx(float(want[t, token.id]), abs=1e-3)
        assert len(token.top) == 2
        assert token.top[0][1] == pytest.approx(float(want[t].max()), abs=1e-3)
    answer = [token for event in client.events for token in event.tokens]
    for t, token in enumerate(answer, len(text) - 1):
        assert token.logprob == pytest.approx(float(want[t, token.id]), abs=1e-3)
        assert token.top[0] == (token.id, token.logprob)


def test_logprobs_of_a_prompt_that_is_read_again():
    pruned = pruned_model()
    request = Request("l", prompt(30, 9), 4, GREEDY, prompt_logprobs=1)
    engine, again = core(pruned, chunk=7, max_rows=7), []

    def interrupt(core, step):
        if step == 1:
            again.append(engine.scheduler.running[0].done)
            engine._read_all_again()

    (client,) = serve(engine, [(0, request)], after=interrupt)
    assert 0 < again[0] < 30
    (logs,) = [event.prompt for event in client.events if event.prompt]
    assert [token.id for token in logs] == list(request.prompt)


def test_the_end_token_and_sizes():
    pruned = pruned_model()
    request = Request("e", prompt(30, 4), 12, GREEDY, logprobs=1)
    want = alone(pruned, request)
    end = next(token for token in want[2:] if token not in want[:2])
    pruned.tokenizer.eos_token_id = end
    count = want.index(end) + 1
    (client,) = serve(core(pruned), [(0, request)])
    # it is among the tokens, not in the text
    assert (client.finish(), client.tokens()) == ("stop", want[:count])
    assert client.text() == "".join(f" w{token}" for token in want[: count - 1])
    last = client.of()[-1]
    assert (last.stop_reason, last.usage.completion_tokens) == (end, count)
    assert last.tokens[0].logprob == last.tokens[0].top[0][1]
    # and whoever did not ask for a report still learns what it cost
    assert last.drops.dropped == ()
    assert 0 < last.drops.bytes < last.drops.dense_bytes * 3
    for change, found in [
        ({"ignore_eos": True}, ("length", want)),
        ({"min_tokens": 12}, ("length", None)),
    ]:
        (client,) = serve(core(pruned), [(0, replace(request, **change))])
        assert client.finish() == found[0]
        assert client.tokens() == found[1] or (found[1] is None and end not in client.tokens()[:11])


@pytest.mark.parametrize("again", [None, 2, 12], ids=["once", "again early", "again late"])
def test_a_report_tells_every_drop_once(again):
    pruned = pruned_model()
    request = Request("d", prompt(40, 2), 20, GREEDY, report=True)

    def interrupt(core, step):
        if step == again:
            core._read_all_again()

    engine = core(pruned, chunk=16, max_rows=16)
    clients = serve(engine, [(0, request), *requests(4)], after=interrupt)
    client = next(client for client in clients if client.request.id == "d")
    drops = [event.drops for event in client.events if event.drops]
    told = [(layer, at, by) for d in drops for layer, pairs in d.dropped for at, by in pairs]
    assert len(told) == len({(layer, at) for layer, at, _ in told})
    # with every token, not beside it
    assert len(client.events) == len(drops) >= 20
    from kvprune import PrunedCache

    ids = [*request.prompt, *client.tokens()][:-1]
    import torch

    cache = PrunedCache(pruned, record=True)
    with torch.inference_mode():
        pruned.model(torch.tensor([ids]), past_key_values=cache)
    want = cache.drop_step[:, 0]
    assert sorted(told) == [
        (layer, at, int(want[layer, at])) for layer in range(3) for at in range(len(ids))
        if want[layer, at] < len(ids)
    ]  # fmt: skip
    assert list(drops[-1].kept) == cache.kept[:, 0].tolist()
    assert drops[-1].step == len(ids)


def test_a_prompt_that_does_not_fit_is_refused_and_others_go_on():
    pruned = pruned_model(config=DenseConfig())
    large = Request("large", prompt(400, 1), 5, GREEDY)
    clients = serve(core(pruned, 150_000, chunk=32), [(0, large), *requests(4)])
    error = clients[0].of()[-1].error
    assert error.code == "context_length_exceeded"
    assert "larger --kv-budget" in error.message
    check(clients[1:], pruned)


def test_an_answer_that_does_not_fit_ends():
    pruned = pruned_model(config=DenseConfig())
    long = Request("long", prompt(20, 1), 300, GREEDY)
    (client,) = serve(core(pruned, 150_000), [(0, long)])
    assert client.finish() == "length"
    assert 20 < len(client.tokens()) < 300
    assert client.tokens() == alone(pruned, long)[: len(client.tokens())]
