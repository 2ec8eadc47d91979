"""How long does a stream wait while a long prompt is read beside it? No longer than one chunk.

Our server, SmolLM2 at strength 80: streams are running, then a prompt of 8,000 tokens arrives. It
is read in chunks, and between two chunks every stream gets its next token.
"""

import asyncio
import itertools
import json
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from serve import Server, prompts, servers


async def stream(server: Server, prompt: str, new: int, begun: asyncio.Event) -> list[float]:
    """When each piece of the answer came; `begun` is set at the fourth."""
    import httpx

    body = {
        "model": server.model, "prompt": prompt, "max_tokens": new, "temperature": 0,
        "stream": True, "ignore_eos": True,
    }  # fmt: skip
    times: list[float] = []
    async with (
        httpx.AsyncClient(timeout=600, trust_env=False) as client,
        client.stream(
            "POST", f"http://127.0.0.1:{server.port}/v1/completions", json=body
        ) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
                if len(times) == 4:
                    begun.set()
    return times


async def measure(server: Server, short: list[str], long: str, new: int) -> dict[str, Any]:
    begun = [asyncio.Event() for _ in short]
    streams = [
        asyncio.create_task(stream(server, prompt, new, event))
        for prompt, event in zip(short, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    arrived = time.perf_counter()
    first = (await stream(server, long, 4, asyncio.Event()))[0]
    pieces = await asyncio.gather(*streams)
    reading, alone = [], []
    for times in pieces:
        for a, b in itertools.pairwise(times):
            # a gap that begins after the arrival and ends before the first token of its answer
            if a >= arrived and b <= first:
                reading.append(b - a)
            elif a > first:
                alone.append(b - a)
    return {
        "seconds_to_read": first - arrived, "gaps": len(reading), "longest": max(reading),
        "median": statistics.median(reading), "median_after": statistics.median(alone),
    }  # fmt: skip


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    args.own, args.peers, args.vllm = "80", "", ""
    streams, tokens, new = (2, 1500, 40) if args.sizes == "quick" else (16, 8000, 150)
    repeats = {"quick": 1, "bench": 2, "full": 3}[args.sizes]
    short, (long,) = prompts(streams, 100, 200), prompts(1, tokens, tokens)
    with tempfile.TemporaryDirectory() as name:
        (server,) = servers(args, Path(name), args.dtype)
        try:
            server.start(Path(name))
            asyncio.run(measure(server, short[:1], short[-1] * 8, 40))
            runs = [asyncio.run(measure(server, short, long, new)) for _ in range(repeats)]
            server.signal(signal.SIGTERM)
        finally:
            server.close()
    ratio = statistics.median(run["longest"] / run["median"] for run in runs)
    rows = [[run["seconds_to_read"], run["longest"], run["median"], run["median_after"]]
            for run in runs]  # fmt: skip
    columns = [f"{tokens:,} tokens read in s", "longest gap", "median gap", "median, alone"]
    harness.report(args, {"longest_gap_vs_one_chunk": ratio}, columns, rows, {"runs": runs})


if __name__ == "__main__":
    main()
