"""One page of all ratios: benchmarks/results/*.json → benchmarks/results/README.md.

    python benchmarks/page.py            after `make bench`, which runs it

Each ratio stands beside the bar that it has to clear; a ratio that does not is marked.
"""

import argparse
import json
from pathlib import Path

import harness
from kvprune.files import write_whole

# script → ratio → the question, and the bar: at least (≥) or at most (≤) so much
QUESTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "decode": {
        "float32_b32_vs_dynamic": (
            "tokens/s against `DynamicCache`: 80 % of 1,000 pruned, batch 32, float32", "≥ 2",
        ),
        "float32_b32_vs_static": ("the same against `StaticCache`", "≥ 1.2"),
        "bfloat16_b32_vs_dynamic": ("the same against `DynamicCache`, bfloat16", "≥ 2"),
        "bfloat16_b32_vs_static": ("the same against `StaticCache`, bfloat16", "≥ 1.2"),
        "float32_ctx64_vs_dynamic": (
            "tokens/s against `DynamicCache` at context 64, the worst of batches 1, 8, 32",
            "≥ 0.9",
        ),
        "attention_bandwidth_share": (
            "attention's bytes/s in decoding against the machine's read bandwidth", "≥ 0.5",
        ),
        "flat_1000_to_32000": ("time a token at context 32,000 / at 1,000, 256 survivors", "≤ 1.1"),
        "uneven_vs_ideal": ("time a step with uneven rows / with even ones", "≤ 1.1"),
    },
    "prefill": {
        "time_1000": ("time to read 1,000 tokens, 80 % pruned / dense SDPA", "≤ 1"),
        "time_8192": ("time to read 8,192 tokens, 80 % pruned / dense SDPA", "≤ 0.8"),
    },
    "memory": {
        "bytes_at_80": ("bytes of the cache at 80 % pruned / dense, all counted", "≤ 0.25"),
        "prefill_peak_16000_to_32000": ("peak memory of reading 32,000 tokens / 16,000", "≤ 2.2"),
    },
    "train_step": {
        "step_float32": ("time of a training step / dense, α = 1, float32", "≤ 1.1"),
        "step_bfloat16": ("the same, bfloat16 autocast", "≤ 1.1"),
        "memory_2048_to_4096": ("peak memory of a training layer, 4,096 / 2,048 tokens", "≤ 2.2"),
        "memory_4096_to_8192": ("the same, 8,192 / 4,096", "≤ 2.2"),
    },
    "gate": {
        "speedup_alpha_1.5": ("α-sigmoid, forward and backward, against entmax, α = 1.5", "≥ 50"),
        "speedup_alpha_4": ("the same, α = 4", "≥ 50"),
        "speedup_alpha_8": ("the same, α = 8", "≥ 50"),
    },
}  # fmt: skip


def clears(ratio: float, bar: str) -> bool:
    sign, number = bar.split()
    return ratio >= float(number) if sign == "≥" else ratio <= float(number)


def page(results: dict[str, dict]) -> str:
    """The page for results by script; a ratio that nobody asked about is listed without a bar."""
    lines = [
        "# Ratios",
        "",
        "Measured in turn in one process, medians over rounds. `make bench` measures them again "
        "and writes this page; a ✗ does not clear its bar.",
        "",
        "| question | ratio | bar | command | machine |",
        "|---|---:|---:|---|---|",
    ]
    for script in [*QUESTIONS, *sorted(set(results) - set(QUESTIONS))]:
        result = results.get(script, {"ratios": {}})
        asked = QUESTIONS.get(script, {})
        for name, ratio in result["ratios"].items():
            question, bar = asked.get(name, (f"`{name}`", ""))
            mark = "" if not bar or clears(ratio, bar) else " ✗"
            machine = "{cpu}, {cores} cores".format(**result["machine"])
            cells = (question, f"{ratio:.3g}{mark}", bar, f"`{result['command']}`", machine)
            lines.append(f"| {' | '.join(cells)} |")
    packages = {}
    for result in results.values():
        for package, number in result["versions"].items():
            packages.setdefault(package, set()).add(number)
    shown = [f"{package} {' and '.join(sorted(numbers))}" for package, numbers in packages.items()]
    return "\n".join([*lines, "", f"{', '.join(shown)}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="the folder")
    folder = parser.parse_args().results
    results = {f.stem: json.loads(f.read_text()) for f in sorted(folder.glob("*.json"))}
    if not results:
        raise SystemExit(f"{folder} holds no results; run the benchmarks with --save first")
    write_whole(folder / "README.md", page(results).encode())
    print(folder / "README.md")


if __name__ == "__main__":
    main()
