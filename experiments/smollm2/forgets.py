"""What pruned SmolLM2 forgets: pages for an article and for a chat, and the paper's statistics.

    python -m experiments.smollm2.forgets MODEL ADAPTER [SECOND] --news NEWS.txt --book BOOK.txt

The pages (docs/pages) need no server; a second adapter reads the article, too, for a page of both
side by side. Without a book there are only pages. The counts are those of experiments/forgetting.py
over texts that the model was not trained on: docs/results/smollm2_forgetting.json and figures, with
a verdict on each of the paper's findings.
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
from kvprune.explain.against import read_again
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
    parser.add_argument("--news", type=Path, required=True, help="not trained on")
    parser.add_argument("--book", type=Path, help="not trained on; without it: pages only")
    parser.add_argument("--article-tokens", type=int, default=1000)
    parser.add_argument("--write", type=int, default=120, help="tokens of each answer in the chat")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    if len(args.adapters) not in (1, 2):
        raise PruneError(f"{len(args.adapters)} adapters were given; pass one, or two to compare")
    quiet()
    loaded = load_with_tokenizer(str(args.model), str(args.adapters[0]))
    pruned, tokenizer = loaded.attached(), loaded.tokenizer
    traces = {
        name: read.with_misses(progress=True)
        for name, read in read_texts(args, pruned, tokenizer).items()
    }
    for name, trace in traces.items():
        publish(args, name, trace)
    if len(args.adapters) == 2:
        other = load_with_tokenizer(str(args.model), str(args.adapters[1]))
        again = read_again(traces["article"], other.attached(), other.tokenizer)
        publish(args, "two_adapters", traces["article"], again.with_misses(progress=True))
    if args.book is None:
        return
    sources = [str(args.news), str(args.book)]
    study = study_corpus(pruned, tokenizer, sources, args.length, args.rows)
    print(study.save(args.docs / "results" / "smollm2_forgetting.json"))
    for drawn in figures.save(study, args.docs / "figures", "smollm2_forgetting"):
        print(drawn)
    print("\n".join(verdicts(study)))


def publish(
    args: argparse.Namespace, name: str, trace: Trace, against: Trace | None = None
) -> None:
    title = f"SmolLM2: {name.replace('_', ' ')}"
    file = trace.to_html(args.docs / "pages" / f"smollm2_{name}.html", title, against)
    for read in (trace, against):
        if read is not None:
            read.save(args.runs / "pages" / f"{name}_{read.adapter}.npz")
            dropped = float(read.sparsity[:, -1].mean())
            told = f"{len(read.tokens)} tokens, {dropped:.0%} dropped at the end"
            print(f"{file}: {read.adapter}, {told}", flush=True)


def read_texts(args: argparse.Namespace, pruned: Pruned, tokenizer: Any) -> dict[str, Trace]:
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
