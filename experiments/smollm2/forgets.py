"""What pruned SmolLM2 forgets: pages for an article and for a chat, and the paper's statistics.

    python -m experiments.smollm2.forgets MODEL ADAPTER --news NEWS.txt --book BOOK.txt

The pages (docs/pages) need no server. The counts are those of experiments/forgetting.py, over texts
that the model was not trained on: docs/results/smollm2_forgetting.json and figures, with a verdict
on each of the paper's findings.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from experiments.forgetting import verdicts
from experiments.smollm2 import common
from kvprune import Pruned
from kvprune.adapters.load import load_with_tokenizer
from kvprune.errors import PruneError
from kvprune.evaluate.text_file import read_text
from kvprune.explain import Trace, figures
from kvprune.explain.corpus_study import study_corpus
from kvprune.explain.prompt import trace_prompt
from kvprune.utils.quiet import quiet

QUESTIONS = (
    "Hello! Can you explain in a few sentences why the sky is blue?",
    "And why is it red in the evening?",
    "Thank you. Now something else: how do I bake a simple loaf of bread?",
    "Back to the sky: what was the first thing that I asked you?",
)


def main() -> None:
    parser = common.arguments(__doc__)
    for name in ("news", "book"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="not trained on")
    parser.add_argument("--article-tokens", type=int, default=1000)
    parser.add_argument("--write", type=int, default=120, help="tokens of each answer in the chat")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    if len(args.adapters) != 1:
        raise PruneError(f"{len(args.adapters)} adapters were given; pass one")
    quiet()
    loaded = load_with_tokenizer(str(args.model), str(args.adapters[0]))
    pruned, tokenizer = loaded.attached(), loaded.tokenizer
    for name, read in pages(args, pruned, tokenizer).items():
        trace = read.with_misses(progress=True)
        file = trace.to_html(args.docs / "pages" / f"smollm2_{name}.html", f"SmolLM2: {name}")
        trace.save(args.runs / "pages" / f"{name}.npz")
        gone = float(trace.sparsity[:, -1].mean())
        print(f"wrote {file}: {len(trace.tokens)} tokens, {gone:.0%} gone at the end", flush=True)
    sources = [str(args.news), str(args.book)]
    study = study_corpus(pruned, tokenizer, sources, args.length, args.rows)
    print(study.save(args.docs / "results" / "smollm2_forgetting.json"))
    for drawn in figures.save(study, args.docs / "figures", "smollm2_forgetting"):
        print(drawn)
    print("\n".join(verdicts(study)))


def pages(args: argparse.Namespace, pruned: Pruned, tokenizer: Any) -> dict[str, Trace]:
    article = read_text(args.news).split("\n\n\n", 1)[0]
    ids = tokenizer(article, verbose=False).input_ids[: args.article_tokens]
    return {
        "article": Trace.from_ids(pruned, tokenizer, ids),
        "chat": chat(pruned, tokenizer, QUESTIONS, args.write),
    }


def chat(pruned: Pruned, tokenizer: Any, questions: tuple[str, ...], write: int) -> Trace:
    """The trace of a conversation with the model's own greedy answers.

    Each turn reads the conversation from the start, which drops the same tokens as a cache kept
    between turns: decisions do not depend on how a text is cut.
    """
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        torch.manual_seed(0)
        trace = trace_prompt(pruned, tokenizer, text, write, do_sample=False)
        answer = tokenizer.decode(trace.ids[trace.prompt :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer.strip()})
        print(f"> {question}\n{answer.strip()}", flush=True)
    return trace


if __name__ == "__main__":
    main()
