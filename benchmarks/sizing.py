"""Does the sizing model (kvprune eval sizing) foretell what one replica and two of them do?

A replica is a server with one core. From two bursts of one, of a single client and of several, come
the numbers that the model needs; then clients that ask again as soon as they are answered are
compared with what it says, on one replica and on two at once. The clients take some of the cores.
"""

import asyncio
import itertools
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import kvprune
from kvprune.evaluate.cost.sizing import Load, Replica
from models import real_rows
from serve import Reply, Server, ask, free_port

# rows of the burst; (rows, tokens of a prompt, of an answer, requests of each client) of the checks
SIZES = {
    "quick": (4, [(2, 100, 12, 1), (4, 100, 12, 1)]),
    "bench": (8, [(8, 300, 48, 2), (4, 300, 48, 2), (8, 150, 64, 1)]),
    "full": (16, [(16, 300, 48, 3), (4, 300, 48, 3), (8, 150, 96, 2), (8, 1000, 32, 2)]),
}


def replica_on(core: int, model: str, dtype: str) -> Server:
    port = free_port()
    command = ["taskset", "--cpu-list", str(core), sys.executable, "-m", "kvprune", "serve", model,
               "--port", str(port), "--kv-budget", "1GB", "--dtype", dtype,
               "--prefix-budget", "0"]  # fmt: skip
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    return Server(f"replica {core}", command, port, model, threads)


async def burst(server: Server, texts: list[str], new: int) -> list[Reply]:
    """All at once."""
    return await asyncio.gather(*(ask(server, text, new) for text in texts))


async def closed(servers: list[Server], texts: list[str], new: int, times: int) -> dict[str, float]:
    """So many clients of each server as there are texts, each asking `times` times in turn."""

    async def client(server: Server, text: str) -> list[float]:
        taken = []
        for number in range(times):
            begun = time.perf_counter()
            # other words at its start, or it would be found among what was read
            await ask(server, f"{number} {text}", new)
            taken.append(time.perf_counter() - begun)
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
    alone = asyncio.run(burst(server, texts[:1], new))
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
    pruned = kvprune.load(args.model)
    most = max(rows, *(check[0] for check in checks))
    ids = real_rows(pruned, most, max(check[1] for check in checks))

    def texts(count: int, tokens: int) -> list[str]:
        return [str(pruned.tokenizer.decode(row[:tokens])) for row in ids[:count]]

    ratios: dict[str, float] = {}
    table: list[list[object]] = []
    extra: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        both = [replica_on(core, args.model, args.dtype) for core in (0, 1)]
        # a signal must not leave servers behind
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda server: server.start(Path(name)), both))
            # kernels are made before anything is measured
            asyncio.run(closed(both, ["Once upon a time " * 20] * 2, 4, 1))
            replica = measure(both[0], texts(rows, length), length, new)
            extra["replica"] = {"read": replica.read, "fixed": replica.fixed,
                                "per_row": replica.per_row}  # fmt: skip
            print(replica, file=sys.stderr, flush=True)
            for asked, (clients, prompt, answer, times) in [
                *((both[:1], check) for check in checks),
                (both, checks[0]),
            ]:
                load = Load(1.0, prompt, answer)
                said = len(asked) * replica.requests_per_second(load, clients)
                found = asyncio.run(closed(asked, texts(clients, prompt), answer, times))
                rate = found["requests_per_s"]
                ratios[f"{len(asked)}_{clients}_{prompt}_{answer}"] = rate / said
                seconds = replica.seconds_per_request(load, clients)
                table.append([len(asked), clients, prompt, answer, rate, said, rate / said,
                              found["request_seconds"], seconds])  # fmt: skip
                print(table[-1], file=sys.stderr, flush=True)
        finally:
            for server in both:
                server.close()
    columns = ["replicas", "clients of each", "prompt", "answer", "requests/s", "foretold",
               "measured / foretold", "seconds", "foretold"]  # fmt: skip
    harness.report(args, ratios, columns, table, extra)


if __name__ == "__main__":
    main()
