"""Does the sizing model (kvprune eval sizing) foretell what one replica and two of them do?

A replica is a server with one core. From two bursts of one, of a single client and of several, come
the numbers that the model needs; then clients that ask again as soon as they are answered are
compared with what it says, on one replica and on two at once. The clients take some of the cores.
"""

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from kvprune.evaluate.cost.sizing import Load, Replica
from serve import Reply, Server, ask, free_port, prompts

# rows of the burst; (rows, tokens of a prompt, of an answer, requests of each client) of the checks
SIZES = {
    "quick": (4, [(2, 100, 12, 1), (4, 100, 12, 1)]),
    "bench": (8, [(8, 300, 48, 2), (4, 300, 48, 2), (8, 150, 96, 1)]),
    "full": (16, [(16, 300, 48, 3), (4, 300, 48, 3), (8, 150, 96, 2), (8, 1000, 32, 2)]),
}


def start(folder: Path, core: int, model: str, dtype: str) -> Server:
    port = free_port()
    command = ["taskset", "--cpu-list", str(core), sys.executable, "-m", "kvprune", "serve", model,
               "--port", str(port), "--kv-budget", "1GB", "--dtype", dtype,
               "--prefix-budget", "0"]  # fmt: skip
    server = Server(f"replica {core}", command, port, model,
                    {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"})  # fmt: skip
    server.start(folder)
    return server


async def burst(server: Server, texts: list[str], new: int) -> list[Reply]:
    """All at once."""
    return await asyncio.gather(*(ask(server, text, new) for text in texts))


async def closed(servers: list[Server], texts: list[str], new: int, times: int) -> dict[str, float]:
    """So many clients of each server as there are texts, each asking `times` times in turn."""
    ends: list[float] = []

    async def client(server: Server, text: str) -> list[float]:
        taken = []
        for number in range(times):
            begun = time.perf_counter()
            # other words at its start, or it would be found among what was read
            await ask(server, f"{number} {text}", new)
            ends.append(time.perf_counter())
            taken.append(ends[-1] - begun)
        return taken

    begun = time.perf_counter()
    taken = await asyncio.gather(*(client(s, t) for s in servers for t in texts))
    seconds = time.perf_counter() - begun
    return {
        "requests_per_s": len(servers) * len(texts) * times / seconds,
        "request_seconds": statistics.fmean(itertools.chain(*taken)),
    }


def measure(server: Server, texts: list[str], length: int, new: int) -> Replica:
    """What the model needs, of one replica."""
    alone = [asyncio.run(burst(server, texts[:1], new))[0] for _ in range(2)]
    several = asyncio.run(burst(server, texts, new))
    # of a burst the last first token comes when all has been read
    first = max(reply.first for reply in several)
    steps = {
        1: statistics.median(gap for reply in alone for gap in reply.gaps),
        # once all rows write
        len(texts): statistics.median(
            gap for reply in several for gap in reply.gaps[-(new // 2) :]
        ),
    }
    return Replica.measured(len(texts) * length / first, steps, 1e9)


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m-80")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    rows, checks = SIZES[args.sizes]
    length, new = checks[0][1:3]
    texts = {check: prompts(check[0], check[1], check[1]) for check in checks}
    burst_texts = prompts(rows, length, length)
    ratios: dict[str, float] = {}
    table: list[list[object]] = []
    extra: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        both: list[Server] = []
        try:
            for core in (0, 1):
                both.append(start(Path(name), core, args.model, args.dtype))
                # kernels are made before anything is measured
                asyncio.run(burst(both[-1], ["Once upon a time " * 20] * 2, 4))
            replica = measure(both[0], burst_texts, length, new)
            extra["replica"] = {"read": replica.read, "fixed": replica.fixed,
                                "per_row": replica.per_row}  # fmt: skip
            for check in checks:
                clients, prompt, answer, times = check
                load = Load(1.0, prompt, answer)
                said = replica.requests_per_second(load, clients)
                found = asyncio.run(closed(both[:1], texts[check], answer, times))
                ratios[f"one_{clients}_{prompt}_{answer}"] = found["requests_per_s"] / said
                table.append(_line(1, check, found["requests_per_s"], said))
            clients, prompt, answer, times = checks[0]
            said = 2 * replica.requests_per_second(Load(1.0, prompt, answer), clients)
            found = asyncio.run(closed(both, texts[checks[0]], answer, times))
            ratios[f"two_{clients}_{prompt}_{answer}"] = found["requests_per_s"] / said
            table.append(_line(2, checks[0], found["requests_per_s"], said))
        finally:
            for server in both:
                server.close()
    columns = ["replicas", "clients of each", "prompt", "answer", "requests/s", "foretold",
               "measured / foretold"]  # fmt: skip
    harness.report(args, ratios, columns, table, extra)


def _line(replicas: int, check: tuple[int, ...], found: float, said: float) -> list[object]:
    return [replicas, *check[:3], found, said, found / said]


if __name__ == "__main__":
    main()
