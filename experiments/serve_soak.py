"""An hour of everything that clients do to a server, and nothing may be lost, stuck or wrong.

    python -m experiments.serve_soak [--minutes 60]

A real server on the loopback address serves `tiny` with random votes, and a budget that many
requests together exceed. Clients arrive at random: some stream, some cancel in the middle, some
vanish, some send nonsense, some ask for several answers or go on with a conversation. Checked all
the time: every answer ends, every error has OpenAI's shape, no status is above 499 but 503. Checked
for a sample: greedy answers are those of the model alone. Checked when it has become quiet, every
few minutes: no row, no byte of the arena and no parked row is left, and the process has not grown.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import torch

import kvprune
from experiments.publish import publish
from kvprune import tiny
from kvprune.evaluate.throughput.timing import machine, versions
from kvprune.serve.api import create_app
from kvprune.serve.detokeniser import Detokeniser
from kvprune.serve.engine import Engine
from kvprune.serve.server import Server
from kvprune.serve.sockets import bind

DOCS = Path(__file__).parents[1] / "docs"
BUDGET = 3_000_000
CLIENTS = 24
QUIET_EVERY = 120.0  # seconds
TIMEOUT = 120.0  # longer, and an answer is stuck
# two logits that are closer may change places with the shape of the batch
CLOSE = 2e-3


def make_engine() -> Engine:
    pruned = kvprune.attach(tiny.load_model(), kvprune.PruningConfig(rank=8))
    random_votes = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in pruned.layers:
            assert layer.interaction is not None
            for weight in (layer.interaction.query.weight, layer.interaction.key.weight):
                weight.copy_(torch.randn(weight.shape, generator=random_votes) * 0.15)
            layer.interaction.beta.fill_(1.0)
    return Engine(
        pruned, name="tiny", budget=BUDGET, max_rows=16, chunk=64, max_waiting=64,
        prefix_budget=BUDGET // 2, admission="optimistic",
    )  # fmt: skip


class Soak:
    def __init__(self, engine: Engine, address: str, seed: int):
        self.engine, self.address, self.random = engine, address, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[tuple[list[int], int, str]] = []
        self.words = gzip.decompress(tiny.text_file("held_out").read_bytes()).decode().split()

    async def client(self, http: httpx.AsyncClient, until: float) -> None:
        """One client after another, until it is time."""
        doings: list[Callable[[httpx.AsyncClient], Awaitable[None]]] = [
            self.answer, self.answer, self.stream, self.stream, self.vanish, self.nonsense,
            self.several, self.conversation, self.look,
        ]  # fmt: skip
        while time.monotonic() < until:
            doing = self.random.choice(doings)
            try:
                await asyncio.wait_for(doing(http), TIMEOUT)
                self.counts[doing.__name__] += 1
            except TimeoutError:
                self.wrong.append(f"{doing.__name__} is stuck")
            except (httpx.HTTPError, KeyError, ValueError, AssertionError) as error:
                self.wrong.append(f"{doing.__name__}: {type(error).__name__}: {error}")
            await asyncio.sleep(self.random.expovariate(4))

    def prompt(self, longest: int = 150) -> str:
        start = self.random.randrange(len(self.words) - longest)
        return " ".join(self.words[start : start + self.random.randrange(1, longest)])

    def body(self, **more: Any) -> dict[str, Any]:
        greedy = self.random.random() < 0.5
        body = {
            "model": "tiny", "prompt": self.prompt(), "max_tokens": self.random.randrange(1, 60),
            "temperature": 0 if greedy else 1.0,
        }  # fmt: skip
        if not greedy:
            body |= {"top_p": 0.9, "seed": self.random.randrange(100)}
        if self.random.random() < 0.2:
            body["stop"] = [". ", "the"]
        if self.random.random() < 0.1:
            body["kvprune"] = {"report": True}
        if self.random.random() < 0.1:
            body["kvprune"] = {"threshold": self.random.choice([-0.5, 0.5])}
        return body | more

    def check(self, response: httpx.Response) -> dict[str, Any] | None:
        """The body of a good answer; None for an error, whose shape is checked."""
        body: dict[str, Any] = response.json()
        self.counts[f"status {response.status_code}"] += 1
        if response.status_code == 200:
            return body
        assert response.status_code < 500 or response.status_code == 503, response.text
        assert set(body) == {"error"}, body
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
        return None

    async def answer(self, http: httpx.AsyncClient) -> None:
        body = self.body(logprobs=1)
        found = self.check(await http.post("/v1/completions", json=body))
        if found is None:
            return
        (choice,) = found["choices"]
        assert choice["finish_reason"] in ("stop", "length"), choice
        plain = body["temperature"] == 0 and not {"stop", "kvprune"} & body.keys()
        if plain and self.random.random() < 0.2:
            ids = self.engine.tokenizer(body["prompt"]).input_ids
            self.samples.append((ids, body["max_tokens"], choice["text"]))

    async def stream(self, http: httpx.AsyncClient) -> None:
        body = self.body(stream=True, stream_options={"include_usage": True})
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self.check(response)
                return
            self.counts["status 200"] += 1
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        if any('"error"' in line for line in lines):
            self.counts["error in a stream"] += 1
            return
        assert lines[-1] == "data: [DONE]", lines[-1]
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        assert chunks[-1]["usage"]["completion_tokens"] <= body["max_tokens"]
        assert chunks[-2]["choices"][0]["finish_reason"] in ("stop", "length"), chunks[-2]

    async def vanish(self, http: httpx.AsyncClient) -> None:
        body = self.body(stream=True, max_tokens=200)
        with suppress(asyncio.TimeoutError):
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    if self.random.random() < 0.1:
                        return

    async def nonsense(self, http: httpx.AsyncClient) -> None:
        bad: list[dict[str, Any]] = [
            self.body(max_tokens=-1), self.body(n=10_000), self.body(temperature="hot"),
            self.body(prompt=[]), self.body(prompt=[10**9]), self.body(max_tokens=100_000),
            self.body(tools=[{"type": "function"}]), self.body(model="other"), {},
            self.body(prompt="far too long " * 400), self.body(logprobs=1000), {"prompt": {"a": 1}},
        ]  # fmt: skip
        assert self.check(await http.post("/v1/completions", json=self.random.choice(bad))) is None
        response = await http.post("/v1/completions", content=b'{"prompt": ')
        assert self.check(response) is None

    async def several(self, http: httpx.AsyncClient) -> None:
        n = self.random.randrange(2, 5)
        prompts = [self.prompt(40) for _ in range(self.random.randrange(1, 4))]
        body = self.body(prompt=prompts, n=n, echo=self.random.random() < 0.3)
        found = self.check(await http.post("/v1/completions", json=body))
        if found is not None:
            numbers = [choice["index"] for choice in found["choices"]]
            assert numbers == list(range(n * len(prompts))), numbers

    async def conversation(self, http: httpx.AsyncClient) -> None:
        """A text that goes on from its own answers: prefixes are found again."""
        text = self.prompt(80)
        for _ in range(3):
            body = {"model": "tiny", "prompt": text, "max_tokens": 20, "temperature": 0}
            found = self.check(await http.post("/v1/completions", json=body))
            if found is None:
                return
            text += found["choices"][0]["text"] + " " + self.prompt(10)

    async def look(self, http: httpx.AsyncClient) -> None:
        for path in ("/health", "/metrics", "/v1/models", "/v1/requests", "/", "/v1/prefixes"):
            response = await http.get(path)
            assert response.status_code == 200, (path, response.status_code)

    def check_samples(self) -> None:
        """Greedy answers against the model alone; rounding may turn two that are close."""
        samples, self.samples = self.samples, []
        for ids, new, text in samples:
            self.counts["answers compared"] += 1
            want, gap = alone(self.engine, ids, new)
            if want == text:
                continue
            if gap < CLOSE:
                self.counts["answers that turned at a tie"] += 1
            else:
                self.wrong.append(f"alone it is {want!r}, not {text!r} (smallest gap {gap})")

    async def quiet(self) -> dict[str, Any]:
        """When all have gone, nothing may be left."""
        core, end = self.engine._core, time.monotonic() + 30
        while core.requests and time.monotonic() < end:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.5)
        left = {
            "requests": len(core.requests), "arena": core.runner.arena.used,
            "parked": core._parked, "rows": len(core.scheduler.running),
        }  # fmt: skip
        if any(left.values()):
            self.wrong.append(f"left behind: {left}")
        return {
            "seconds": 0.0, "resident_bytes": resident(), "arena_held": core.runner.arena.held,
            "prefix_bytes": core.prefixes.bytes, "counts": dict(self.counts),
            "counters": {k: v for k, v in core.counters.items() if not isinstance(v, list)},
            "wrong": len(self.wrong), "threads": threading.active_count(),
        }  # fmt: skip


@torch.inference_mode()
def alone(engine: Engine, ids: list[int], new: int) -> tuple[str, float]:
    """The greedy answer of the model by itself, and the smallest gap between its best two."""
    cache, tokens, gap = kvprune.PrunedCache(engine.pruned), list[int](), float("inf")
    given, text = torch.tensor([ids]), Detokeniser(engine.tokenizer, ids)
    pieces = []
    while len(tokens) < new:
        logits = engine.pruned.model(given, past_key_values=cache, use_cache=True).logits[0, -1]
        best = logits.topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        if tokens[-1] == engine.tokenizer.eos_token_id:
            break
        pieces.append(text.add(tokens[-1]))
        given = torch.tensor([tokens[-1:]])
    return "".join(pieces) + text.end(), gap


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


async def run(soak: Soak, seconds: float, every: float = QUIET_EVERY) -> list[dict[str, Any]]:
    start, rows = time.monotonic(), []
    limits = httpx.Limits(max_connections=2 * CLIENTS)
    while (now := time.monotonic()) < start + seconds:
        until = min(now + every, start + seconds)
        async with httpx.AsyncClient(
            base_url=soak.address, timeout=TIMEOUT, limits=limits, trust_env=False
        ) as http:
            await asyncio.gather(*(soak.client(http, until) for _ in range(CLIENTS)))
        row = await soak.quiet()
        await asyncio.to_thread(soak.check_samples)
        rows.append(row | {"seconds": round(time.monotonic() - start), "wrong": len(soak.wrong)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where docs/results is")
    args = parser.parse_args()
    engine = make_engine()
    engine.start()
    bound = bind("127.0.0.1", 0)
    server = Server(create_app(engine), drain=5.0, log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    while not server.started:
        time.sleep(0.05)
    soak = Soak(engine, f"http://127.0.0.1:{bound.getsockname()[1]}", args.seed)
    try:
        rows = asyncio.run(run(soak, 60 * args.minutes))
    finally:
        server.should_exit = True
        thread.join(30)
        engine.stop()
        bound.close()
    for line in soak.wrong[:20]:
        print(line)
    command = shlex.join(["python", "-m", "experiments.serve_soak", *sys.argv[1:]])
    about = {"machine": machine(), "versions": versions(), "command": command, "wrong": soak.wrong}
    publish("serve_soak", about, rows, args.docs)
    raise SystemExit(bool(soak.wrong))


if __name__ == "__main__":
    main()
