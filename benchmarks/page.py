"""One page of all ratios: benchmarks/results/*/*.json → benchmarks/results/README.md.

    python benchmarks/page.py            after `make bench`, which runs it

Each ratio is next to the bar that it has to clear; a ratio that does not is marked.
"""

import argparse
import json
from pathlib import Path

import harness
from kvprune.utils.files import write_atomically

# script → ratio → the question, and the bar: at least (≥) or at most (≤)
QUESTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "decode": {
        "float32_b32_vs_dynamic": (
            "tokens/s against `DynamicCache`: 80 % of 1,000 pruned, batch 32, float32", "≥ 5",
        ),
        "float32_b32_vs_static": ("the same against `StaticCache`", "≥ 1.6"),
        "bfloat16_b32_vs_dynamic": ("the same against `DynamicCache`, bfloat16", "≥ 6"),
        "bfloat16_b32_vs_static": ("the same against `StaticCache`, bfloat16", "≥ 3"),
        "float32_ctx64_vs_dynamic": (
            "tokens/s against `DynamicCache` at context 64, the worst of batches 1, 8, 32",
            "≥ 0.9",
        ),
        "attention_bandwidth_share": (
            "attention's bytes/s in decoding against the machine's read bandwidth", "≥ 0.7",
        ),
        "flat_1000_to_32000": (
            "time per token at context 32,000 / at 1,000, 256 survivors", "≤ 1.1",
        ),
        "uneven_vs_ideal": ("time per step with uneven rows / with even ones", "≤ 1.1"),
        "extents_vs_slots": ("tokens/s, extents against slots, batch 32, even rows", "≥ 0.97"),
        "extents_vs_slots_uneven": ("the same, uneven rows", "≥ 1"),
        "int8_vs_bfloat16": (
            "tokens/s, int8 against bfloat16, batch 16, 80 % of 8,000 pruned", "≥ 1.2",
        ),
        "compiled_vs_eager_b1": (
            "tokens/s, compiled and with our linear layers against eager, SmolLM2's shape, batch 1",
            "≥ 1.5",
        ),
        "compiled_vs_eager_b8": ("the same, batch 8", "≥ 1.2"),
    },
    "linear": {
        "linear_bfloat16_m1": (
            "a linear layer with one row, bfloat16: speed of our kernel against torch's", "≥ 1.5",
        ),
        "linear_bfloat16_m4": ("the same, four rows", "≥ 1"),
        "linear_float32_m1": ("the same, float32, one row", "≥ 1"),
    },
    "prefill": {
        "time_1000": ("time to read 1,000 tokens, 80 % pruned / dense SDPA", "≤ 1.15"),
        "time_8192": ("time to read 8,192 tokens, 80 % pruned / dense SDPA", "≤ 0.8"),
        "time_1000_bfloat16": ("the same of 1,000, bfloat16", "≤ 1.15"),
        "time_8192_bfloat16": ("the same of 8,192, bfloat16", "≤ 0.8"),
        "read_vs_products_16x1000": (
            "time to read 16 x 1,000 tokens of real text / its matrix products, SmolLM2", "≤ 1.35",
        ),
        "read_vs_products_16x2000": ("the same, 16 x 2,000", "≤ 1.4"),
    },
    "rows": {
        "join_and_leave_64_rows_vs_1": (
            "time of a row of 800 survivors that joins and leaves, 64 rows beside it / one",
            "≤ 1.2",
        ),
        "join_800_tokens_vs_200": ("time of a join, 800 survivors / 200", "≤ 4"),
    },
    "memory": {
        "smollm2_bytes_vs_kept": (
            "bytes of SmolLM2's cache / its kept K and V: 16 x 2,000 tokens, strength 80", "≤ 1.15",
        ),
        "smollm2_bytes_vs_dense": ("the same / a dense cache", ""),
        "smollm2_int8_vs_dense": ("the same in int8 / a dense cache of bfloat16", "≤ 0.1"),
        "ages_bytes_vs_kept": ("64 rows of 10 to 2,000 tokens / their kept K and V", "≤ 1.15"),
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
    "fine_tune": {
        "tiny: 0% pruned": ("time of a complete training step of `tiny` / dense, 0 % pruned", ""),
        "tiny: 50% pruned": ("the same, 50 %", ""),
        "tiny: 80% pruned": ("the same, 80 %", ""),
        "tiny: 90% pruned": ("the same, 90 %", ""),
        "tiny: 80% pruned, distilled": ("the same, 80 %, with the dense model as teacher", ""),
    },
    "kept_memory": {
        "training step": ("training step, freed memory kept / given back, processes in turn", ""),
        "reading": ("the same of reading 1,024 tokens", ""),
    },
    "threads": {
        "decode, batch 1, quiet": (
            "time to decode, OpenMP threads spin briefly / at length, quiet machine, batch 1", "",
        ),
        "decode, batch 8, quiet": ("the same, batch 8", ""),
        "read 512 tokens, quiet": ("the same of reading 512 tokens", ""),
        "training step, quiet": ("the same of a training step", ""),
        "decode, batch 1, one core busy": (
            "time to decode, the same beside one busy process, batch 1", "",
        ),
        "decode, batch 8, one core busy": ("the same, batch 8", ""),
        "read 512 tokens, one core busy": ("the same of reading 512 tokens", ""),
        "training step, one core busy": ("the same of a training step", ""),
    },
}  # fmt: skip


def clears(ratio: float, bar: str) -> bool:
    sign, number = bar.split()
    return ratio >= float(number) if sign == "≥" else ratio <= float(number)


def page(results: dict[str, dict[str, dict]]) -> str:
    """The page for results by size and script; a ratio without a question has no bar."""
    lines = [
        "# Ratios",
        "",
        "Measured in turn, medians over rounds. `make bench` measures the first "
        "column again and writes this page; the scripts without `--sizes` measure the second. A ✗ "
        "does not clear its bar.",
        "",
        "| question | `make bench` | full | bar | script |",
        "|---|---:|---:|---:|---|",
    ]
    bench, full = results.get("bench", {}), results.get("full", {})
    for script in [*QUESTIONS, *sorted({*bench, *full} - set(QUESTIONS))]:
        sides = [side.get(script, {"ratios": {}})["ratios"] for side in (bench, full)]
        questions = QUESTIONS.get(script, {})
        for name in dict.fromkeys(name for side in sides for name in side):
            question, bar = questions.get(name, (f"`{name}`", ""))
            cells = [question, *(shown(side.get(name), bar) for side in sides)]
            lines.append(f"| {' | '.join([*cells, bar, f'`benchmarks/{script}.py`'])} |")
    for size, measured in (("make bench", bench), ("full", full)):
        lines += ["", f"{size}: {'; '.join(machines(measured))}."] if measured else []
    return "\n".join([*lines, ""])


def shown(ratio: float | None, bar: str) -> str:
    if ratio is None:
        return "—"
    return f"{ratio:.3g}{'' if not bar or clears(ratio, bar) else ' ✗'}"


def machines(measured: dict[str, dict]) -> list[str]:
    """The machines and versions of these results, each once."""
    lines = []
    for result in measured.values():
        packages = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        lines.append("{cpu}, {cores} cores, ".format(**result["machine"]) + packages)
    return list(dict.fromkeys(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="the folder")
    folder = parser.parse_args().results
    results: dict[str, dict[str, dict]] = {}
    for file in sorted(folder.glob("*/*.json")):
        results.setdefault(file.parent.name, {})[file.stem] = json.loads(file.read_text())
    if not results:
        raise SystemExit(f"{folder} holds no results; run the benchmarks with --save first")
    write_atomically(folder / "README.md", page(results).encode())
    print(folder / "README.md")


if __name__ == "__main__":
    main()
