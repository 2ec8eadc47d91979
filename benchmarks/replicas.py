"""Two processes with a core each, on Ray, or one process with two cores: which serves more?

One process with two cores (A); two replicas of one core each (B); one of these two alone (C).
All run at the same time and are loaded in turn; what waits costs what Ray's processes take while
nothing is asked of them, which is measured too. The clients take their part of the same cores.
"""

import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from json import loads
from pathlib import Path
from typing import Any

import harness
from serve import Server, free_port

# model, clients at once, characters of a prompt, new tokens
LOADS = {
    "quick": [("tiny", 8, 400, 32)],
    "bench": [("tiny", 32, 400, 64)],
    "full": [("tiny", 32, 400, 64), ("smollm2-135m-80", 16, 1500, 32)],
}
SETTINGS = ["--kv-budget", "500MB", "--prefix-budget", "0", "--log-level", "warning"]


def servers(model: str, cores: int) -> dict[str, Server]:
    """The process and the replicas, on as many cores in all."""
    found = {}
    for name, options in (("process", []), ("replicas", ["--replicas", str(cores)])):
        port = free_port()
        command = [sys.executable, "-m", "kvprune", "serve", model, "--port", str(port)]
        env = {"OMP_NUM_THREADS": str(cores), "NUMBA_NUM_THREADS": str(cores)}
        found[name] = Server(f"{name} {model}", [*command, *options, *SETTINGS], port, model, env)
    return found


def replicas(server: Server) -> list[str]:
    """Names, once all of them answer."""
    while True:
        text = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health").read()
        found = loads(text)["replicas"]
        if len(found) == 2 and all(one["alive"] for one in found):
            return [one["replica"] for one in found]
        time.sleep(0.5)


async def load(server: Server, prompts: list[str], new: int, session: str | None) -> float:
    """Tokens a second of all clients together, each with its own stream."""
    import httpx

    headers = {} if session is None else {"x-session-id": session}
    url = f"http://127.0.0.1:{server.port}/v1/completions"

    async def ask(client: httpx.AsyncClient, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": new, "ignore_eos": True, "stream": True}
        async with client.stream("POST", url, json=body, headers=headers) as answer:
            assert answer.status_code == 200
            last = ""
            async for line in answer.aiter_lines():
                last = line or last
        assert last == "data: [DONE]", last

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
        return len(prompts) * new / (time.perf_counter() - start)


def seconds_of_cpu(server: Server) -> float:
    """Of the process and all that it started."""
    import psutil

    root = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
    return float(sum(one.user + one.system for one in times))


def stop(server: Server) -> None:
    """By the signal that lets Ray end its own processes."""
    if server.process is not None:
        server.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(60)
        server.close()


def measure(
    model: str, clients: int, characters: int, new: int, repeats: int, folder: Path
) -> dict[str, Any]:
    text = " ".join(Path(__file__).read_text().split())
    cores = 2
    own = servers(model, cores)
    results: dict[str, list[float]] = {"one process": [], "two replicas": [], "one replica": []}
    try:
        for server in own.values():
            server.start(folder)
        first = f"replica:{replicas(own['replicas'])[0]}"
        before, began = seconds_of_cpu(own["replicas"]), time.monotonic()
        time.sleep(2)
        idle = (seconds_of_cpu(own["replicas"]) - before) / (time.monotonic() - began)
        for turn in range(repeats + 1):
            # other texts each time, that begin differently for each client
            prompts = [
                f"{turn} {number}: {(text * 3)[37 * number :][:characters]}"
                for number in range(clients)
            ]
            for name, kind, session in (
                ("one process", "process", None),
                ("two replicas", "replicas", None),
                ("one replica", "replicas", first),
            ):
                found = asyncio.run(load(own[kind], prompts, new, session))
                if turn:  # the first warms up
                    results[name].append(found)
                print(f"{model}, {name}: {found:.1f} tokens/s", file=sys.stderr, flush=True)
    finally:
        for server in own.values():
            stop(server)
    return {"tokens_per_s": results, "idle_cores_of_ray": idle, "clients": clients,
            "new_tokens": new, "characters": characters}  # fmt: skip


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", help="only this one of the loads")
    parser.add_argument("--repeats", type=int, default=None)
    args = parser.parse_args()
    repeats = args.repeats or (1 if args.sizes == "quick" else 5)
    details: dict[str, Any] = {"ray": version("ray")}
    ratios: dict[str, float] = {}
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as name:
        for cell in LOADS[args.sizes]:
            if args.model not in (None, cell[0]):
                continue
            found = details[cell[0]] = measure(*cell, repeats, Path(name))
            by_turn = found["tokens_per_s"]
            for way in ("two replicas", "one replica"):
                pairs = zip(by_turn[way], by_turn["one process"], strict=True)
                ratio = statistics.median(ours / process for ours, process in pairs)
                ratios[f"{cell[0]}: {way} / one process of two cores"] = ratio
            pairs = zip(by_turn["two replicas"], by_turn["one replica"], strict=True)
            ratios[f"{cell[0]}: two replicas / one"] = statistics.median(a / b for a, b in pairs)
            rows += [[cell[0], way, statistics.median(by_turn[way])] for way in by_turn]
    harness.report(args, ratios, ["model", "served by", "tokens/s"], rows, details)


if __name__ == "__main__":
    main()
