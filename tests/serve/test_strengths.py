"""Several adapters over one copy of the weights: each row as if its model were alone.

What each should give is computed by a model of its own, whose LoRA is added to its weights.
"""

import random

import pytest
import torch
from engines import GREEDY, Client, Words, alone, core, prompt, serve
from torch import nn

import zoo
from helpers import attach_uneven
from kvprune import DenseConfig, PruneError, attach
from kvprune.integration.row_lora import put_beside, run_together, twin
from kvprune.serve.choice import Choice
from kvprune.serve.engine import Engine
from kvprune.serve.request import Request, RequestError, Sampling, Settings

NAMES = ("a", "b", "dense")
# too little for all rows at once
BUDGET = 100_000


def factors(linear, seed):
    random = torch.Generator().manual_seed(seed)
    down = torch.randn(4, linear.in_features, generator=random)
    return down, torch.randn(linear.out_features, 4, generator=random) * 0.02


def linears(model):
    named = dict(model.named_modules())
    return {
        name: module
        for name, module in named.items()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


def finished(host, name):
    pruned = attach(host, DenseConfig()) if name == "dense" else attach_uneven(host, ord(name))
    pruned.tokenizer = Words()
    return pruned


def strengths(family="llama"):
    """Two adapters and none, beside one copy of the weights."""
    base = zoo.make(family)
    hosts = dict(zip(NAMES, (base, twin(base), twin(base)), strict=True))
    for name in ("a", "b"):
        for number, linear in enumerate(linears(hosts[name]).values()):
            put_beside(linear, *factors(linear, 100 * ord(name) + number))
    models = {name: finished(host, name) for name, host in hosts.items()}
    run_together(list(models.values()))
    return models


def apart(family="llama"):
    """The same models, with weights of their own."""
    models = {}
    for name in NAMES:
        host = zoo.make(family)
        if name != "dense":
            for number, linear in enumerate(linears(host).values()):
                down, up = factors(linear, 100 * ord(name) + number)
                linear.weight.data += up @ down
        models[name] = finished(host, name)
    return models


def requests(count, seed=0, names=NAMES, **options):
    draw = random.Random(seed)
    return [
        (
            draw.randrange(20),
            Request(
                f"r{i}", prompt(draw.randrange(1, 60), 100 * seed + i), draw.randrange(1, 40),
                GREEDY, model=names[i % len(names)], **options,
            ),
        )
        for i in range(count)
    ]  # fmt: skip


def check(clients, models):
    for client in clients:
        assert client.tokens() == alone(models[client.request.model], client.request)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("chunk", [3, 512])
def test_rows_of_all_models_share_passes(family, chunk):
    engine = core(strengths(family), chunk=chunk, max_rows=5 if chunk == 3 else 64)
    clients = serve(engine, requests(15))
    check(clients, apart(family))
    assert engine.runner.arena.used == 0
    by_model = engine.counters["by_model"]
    assert [by_model[name]["requests_length"] for name in NAMES] == [5, 5, 5]
    sums = {key: sum(own[key] for own in by_model.values()) for key in by_model["a"]}
    assert sums == {key: engine.counters[key] for key in sums}


def test_models_differ():
    request = Request("r", prompt(30, 1), 20, GREEDY)
    assert len({tuple(alone(pruned, request)) for pruned in apart().values()}) == 3


def test_preempted_cancelled_and_forked():
    forked = [
        (3, Request(f"n{name}", prompt(40, 1), 12, GREEDY, n=3, model=name)) for name in NAMES
    ]
    draw = random.Random(0)

    def cancel(core, step):
        if core.requests and draw.random() < 0.05:
            core.end_all(draw.choice(list(core.requests)), "cancelled")

    engine = core(strengths(), BUDGET, 10_000_000, chunk=8, max_rows=8, admission="optimistic")
    models = apart()
    clients = serve(engine, [*requests(15, seed=1), *forked], after=cancel)
    for client in clients:
        want = alone(models[client.request.model], client.request)
        for index in range(client.request.n):
            tokens = client.tokens(index)
            assert tokens == want[: len(tokens)]
            assert client.finish(index) == "cancelled" or tokens == want
    assert engine.counters["preemptions"] > 2
    assert engine.counters["requests_cancelled"] > 2
    assert engine.runner.arena.used == engine._parked == 0


def test_prefixes_are_of_one_model():
    models = strengths()
    engine = core(models)
    text = prompt(40, 1)
    serve(engine, [(0, Request("1", text, 1, GREEDY, model="a"))])
    again = [Request(f"2{name}", (*text, 5), 8, GREEDY, model=name) for name in NAMES]
    clients = serve(engine, [(0, request) for request in again])
    assert [client.of()[-1].usage.cached_tokens for client in clients] == [40, 0, 0]
    check(clients, apart())
    # and a snapshot that came to a row of another model would be refused
    (prefix,) = (prefix for prefix in engine.prefixes.all() if len(prefix.tokens) == 40)
    sink = Client(Request("3", (*text, 5), 8, GREEDY, model="b"))
    stranger = Choice(sink.request, 0, sink, Words())
    stranger.snapshot = prefix.snapshot
    with pytest.raises(PruneError, match=r"of another cache, it differs in adapter.*model"):
        engine.runner.enter(stranger)


def test_settings_are_of_one_model():
    text = prompt(50, 3)
    engine, models = core(strengths()), apart()
    loose = Settings(threshold=-1e9)
    asked = [Request(name, text, 12, GREEDY, settings=loose, model=name) for name in "ab"]
    clients = serve(engine, [(0, request) for request in asked])
    for name in "ab":
        models[name].adjust(threshold=-1e9)
    check(clients, models)
    with pytest.raises(RequestError, match="threshold cannot be set"):
        engine.runner.method("dense", loose)


def test_a_seed_gives_the_same_tokens_in_any_company():
    sampling = Sampling(temperature=0.8, top_k=20, seed=7)
    request = Request("s", prompt(20, 5), 15, sampling, n=2, model="b")
    (single,) = serve(core({"b": apart()["b"]}), [(0, request)])
    beside = serve(core(strengths(), chunk=8, max_rows=6), [(0, request), *requests(6)])
    client = next(client for client in beside if client.request.id == "s")
    for index in range(2):
        assert client.tokens(index) == single.tokens(index)


def test_each_is_a_model_by_itself():
    models, own = strengths(), apart()
    request = Request("r", prompt(30, 1), 10, GREEDY)
    for name in NAMES:
        assert alone(models[name], request) == alone(own[name], request)
    a, b = (dict(models[name].model.named_parameters()) for name in "ab")
    for name in zoo.make("llama").state_dict().keys() & a.keys():
        assert a[name] is b[name], name
    fingerprints = [pruned.fingerprint() for pruned in models.values()]
    assert len({str(fingerprint) for fingerprint in fingerprints}) == 3


def test_models_with_weights_of_their_own_are_refused():
    with pytest.raises(PruneError, match="do not share their weights"):
        run_together(list(apart().values()))


def test_an_engine_of_several():
    engine = Engine(strengths(), budget="1MB")
    assert (engine.name, engine.models) == ("a", NAMES)
    engine.start()
    try:
        with pytest.raises(RequestError, match=r"'c' does not exist here.*'a', 'b', 'dense'") as no:
            engine.submit(Request("x", (1, 2), 3, model="c"), lambda events: None)
        assert (no.value.status, no.value.code) == (404, "model_not_found")
    finally:
        engine.stop()
