"""The model card: what was trained from what, on what, how, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvprune.train.recipe import Recipe
from kvprune.version import __version__

ARTICLE = "https://arxiv.org/abs/2305.15805"


def text(recipe: Recipe, metrics: dict[str, float]) -> str:
    """Markdown with the header that the hub reads."""
    head: dict[str, Any] = {
        "base_model": recipe.model,
        "library_name": "kvprune",
        "pipeline_tag": "text-generation",
        "tags": ["kvprune", "kv-cache", recipe.train.method.method],
    }
    adapter = recipe.train.tune != "all"
    kind = "An adapter" if adapter else "A model"
    name = Path(recipe.model).name
    load = f'kvprune.load("{recipe.model}", "FOLDER")' if adapter else 'kvprune.load("FOLDER")'
    sources = ", ".join(f"`{Path(source).name}`" for source in recipe.data.sources)
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).strip(),
        "---",
        "",
        f"# {name}, {recipe.train.method.method}",
        "",
        f"{kind} made by [kvprune]({ARTICLE}) {__version__} from `{recipe.model}`, on {sources}, "
        f"{recipe.train.steps} steps of rows of {recipe.data.length} tokens.",
        "",
        "```python",
        "import kvprune",
        "",
        f"pruned = {load}",
        "pruned.model.generate(...)  # prunes while it reads and writes",
        "```",
        "",
        "## Measured on held-out text",
        "",
    ]
    if metrics:
        lines += ["| | soft gate | hard gate |", "|---|---|---|"]
        for label, key, form in (
            ("perplexity", "ppl", "{:.2f}"),
            ("sparsity", "sparsity", "{:.1%}"),
        ):
            cells = [
                form.format(metrics[f"eval_{key}_{gate}"])
                if f"eval_{key}_{gate}" in metrics
                else "–"
                for gate in ("soft", "hard")
            ]
            lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
        lines += ["", "The hard gate is the one that generates."]
    else:
        lines.append("Nothing was held out.")
    settings = recipe.to_dict()
    del settings["model"]
    lines += ["", "## Settings", "", "```yaml", yaml.safe_dump(settings, sort_keys=False).strip()]
    return "\n".join([*lines, "```", ""])
