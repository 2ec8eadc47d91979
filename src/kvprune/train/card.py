"""The model card: base model, data, settings and results of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kvprune.train.config import TrainConfig
from kvprune.train.target import missed_target
from kvprune.version import __version__

ARTICLE = "https://arxiv.org/abs/2305.15805"
KINDS = {
    "all": "The full model; plain transformers reads this folder as the fine-tuned dense model.",
    "interaction": "An adapter: the interaction weights alone; the base model is unchanged.",
    "lora": "An adapter: interaction weights, and LoRA in peft's own format.",
}
ROWS = {"perplexity": ("ppl", "{:.2f}"), "sparsity": ("sparsity", "{:.1%}")}


def model_card(
    config: TrainConfig,
    name: str,
    base: str,
    data: Iterable[str] = (),
    measured: dict[str, float] | None = None,
    settings: dict[str, Any] | None = None,
    steps: int | None = None,
    **front: Any,
) -> str:
    """Markdown with the front matter that the hub reads.

    `measured` is what evaluate() returned, `settings` is recorded along with the training settings.
    Files are listed by name only: a card is public, and the folders of a machine are not.
    """
    sources = [Path(source).name if Path(source).exists() else source for source in data]
    hosted = [s for s, given in zip(sources, data, strict=True) if s == given and " " not in s]
    front_matter = {
        "library_name": "kvprune",
        "pipeline_tag": "text-generation",
        "base_model": base,
        "datasets": hosted,
        "tags": ["kvprune", "kv-cache", config.method.method],
        **front,
    }
    # a folder of this machine
    recorded = {**(settings or {}), "train": replace(config, teacher_cache=None).to_dict()}
    if steps is not None:
        recorded["steps_done"] = steps
    lines = [
        f"---\n{_yaml({k: v for k, v in front_matter.items() if v})}---\n",
        f"# {name}\n",
        f"{_summary(config, base)}\n",
        f"{KINDS[config.tune]} Trained with kvprune {__version__}.\n",
        f'```python\nimport kvprune\n\npruned = kvprune.load("{name}")',
        "pruned.model.generate(...)  # prunes while it reads and writes\n```\n",
        "## Data\n",
        "\n".join(f"- {source}" for source in sources) or "Not recorded.",
        "\n## Measured on held-out text\n",
        *_table(measured or {}),
        *_warning(missed_target(config, measured or {})),
        f"\n## Settings\n\n```yaml\n{_yaml(recorded)}```\n",
    ]
    return "\n".join(lines)


def _summary(config: TrainConfig, base: str) -> str:
    if config.prunes:
        return (
            f"{base}, taught to forget the tokens that it no longer needs "
            f"([Dynamic Context Pruning]({ARTICLE}))."
        )
    return f"{base} with {config.method.method} attention, a baseline for kvprune."


def _table(measured: dict[str, float]) -> list[str]:
    if "eval_ppl_hard" not in measured:
        return ["Not measured."]
    gates = [gate for gate in ("soft", "hard") if f"eval_ppl_{gate}" in measured]
    lines = [
        f"| | {' | '.join(f'{gate} gate' for gate in gates)} |",
        "|---|" + "---:|" * len(gates),
    ]
    for row, (key, form) in ROWS.items():
        cells = [form.format(measured[f"eval_{key}_{gate}"]) for gate in gates]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    start = "eval_sparsity_hard_layer_"
    shares = [f"{value:.0%}" for name, value in measured.items() if name.startswith(start)]
    lines.append(f"\nGeneration uses the hard gate. By layer: {', '.join(shares)}.")
    return lines


def _warning(missed: str) -> list[str]:
    return [f"\n**{missed[0].upper()}{missed[1:]}.**"] if missed else []


def _yaml(values: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text
