"""Engines on tiny models, and what each request should get: the same model, one row at a time."""

from __future__ import annotations

import torch

import zoo
from helpers import attach_uneven
from kvprune import PrunedCache
from kvprune.serve.core import Core
from kvprune.serve.request import Event, Request, Sampling

GREEDY = Sampling(temperature=0)


class Words:
    """A tokenizer whose tokens are words: w0, w1, ..."""

    eos_token_id = None
    chat_template = None

    def decode(self, tokens, **_):
        return "".join(f" w{token}" for token in tokens)


def pruned_model(family="llama", seed=0, config=None):
    model = zoo.make(family, seed=seed)
    if config is None:
        pruned = attach_uneven(model)
    else:
        import kvprune

        pruned = kvprune.attach(model, config)
    pruned.tokenizer = Words()
    return pruned


def core(pruned, budget=10_000_000, prefix_budget=1_000_000, **options):
    return Core(pruned, budget, prefix_budget, **options)


class Client:
    """Collects the events of one request."""

    def __init__(self, request: Request):
        self.request, self.events = request, list[Event]()

    def __call__(self, events: list[Event]) -> None:
        self.events += events

    def of(self, index=0):
        return [event for event in self.events if event.index == index]

    def tokens(self, index=0):
        return [token.id for event in self.of(index) for token in event.tokens]

    def text(self, index=0):
        return "".join(event.text for event in self.of(index))

    def finish(self, index=0):
        (last,) = (event.finish for event in self.of(index) if event.finish)
        assert self.of(index)[-1].finish == last
        return last


def serve(core: Core, arrivals, steps=10_000, after=None):
    """Run requests that arrive at given steps until all have ended; the clients."""
    arrivals = sorted(arrivals, key=lambda pair: pair[0])
    clients = []
    for step in range(steps):
        while arrivals and arrivals[0][0] <= step:
            request = arrivals.pop(0)[1]
            clients.append(Client(request))
            core.begin(request, clients[-1])
        if after is not None:
            after(core, step)
        if not arrivals and not core.requests:
            core.send()
            return clients
        core.step()
        core.send()
    raise AssertionError(f"requests are stuck: {list(core.requests)}")


@torch.inference_mode()
def alone(pruned, request: Request, method=None):
    """Greedy tokens of the request by itself, read as one prompt and then token by token."""
    cache, tokens = PrunedCache(pruned), list(request.prompt)
    new, ids = [], torch.tensor([tokens])
    while len(new) < request.max_tokens:
        logits = pruned.model(ids, past_key_values=cache, use_cache=True).logits[0, -1]
        new.append(int(logits.argmax()))
        ids = torch.tensor([[new[-1]]])
    return new


def prompt(length, seed):
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(101, (length,), generator=random).tolist())
