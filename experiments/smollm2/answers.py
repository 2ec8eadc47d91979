"""Conversations in the dense model's own words: made by prompts.py, answered by the model itself.

    python -m experiments.smollm2.answers MODEL --corpus DIR --out FILE --count 3000 [--part valid]

FILE gets one {"id", "kind", "messages"} per line, in batches; a second call goes on where the first
one stopped. Some answers are sampled, the others greedy, as prompts.py has drawn. Questions of
`--part train` come from documents to train on, those of `valid` and `test` from held-out ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import kvprune
from experiments.smollm2.held_out import Parts, split
from experiments.smollm2.prompts import make
from experiments.smollm2.text import Document, read
from kvprune import DenseConfig
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.errors import PruneError
from kvprune.utils.malloc import keep_memory
from kvprune.utils.quiet import quiet

# longer prompts are left out: with the answer, a conversation should fit into a row of 2,048
LONGEST = 1_400
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 1.0}
GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=3_000, help="conversations in all")
    parser.add_argument("--part", choices=Parts._fields, default="train")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=200, help="at most, per answer")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    quiet()
    keep_memory()
    torch.manual_seed(0)
    parts = split(read(args.corpus))
    held = getattr(parts, args.part)
    documents = held if args.part == "train" else [d for group in held.values() for d in group]
    wanted = conversations(documents, args.count)
    model, tokenizer = load_base(args.model, args.dtype), load_tokenizer(args.model)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = finished(args.out)
    left = [conversation for conversation in wanted if conversation["id"] not in done]
    with kvprune.attach(model, DenseConfig()):
        for batch in batches(left, args.batch):
            answer(batch, model, tokenizer, args.new_tokens)
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in batch]
            with args.out.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
            print(f"{len(finished(args.out)):,} of {len(wanted):,} conversations", flush=True)


def conversations(documents: list[Document], count: int) -> list[dict[str, Any]]:
    """As many as wanted, over all documents in turn, so that each has about as many."""
    if not documents:
        raise PruneError("the corpus has no documents for this part; add some")
    return [make(documents[i % len(documents)], i // len(documents)) for i in range(count)]


def batches(left: list[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    """Of similar length and drawn in one way; group by group, so that all kinds come early."""
    group = 16 * size
    for start in range(0, len(left), group):
        for sampled in (True, False):
            own = [row for row in left[start : start + group] if row["sampled"] == sampled]
            own.sort(key=lambda row: (len(row["turns"]), len(row["turns"][0])))
            yield from (own[i : i + size] for i in range(0, len(own), size))


def answer(
    batch: list[dict[str, Any]], model: PreTrainedModel, tokenizer: Any, new_tokens: int
) -> None:
    """Replace the questions of each conversation by its messages, answers included."""
    way = SAMPLING if batch[0]["sampled"] else GREEDY
    for row in batch:
        system = row["system"]
        row["messages"] = [{"role": "system", "content": system}] if system else []
    for turn in range(max(len(row["turns"]) for row in batch)):
        asked = []
        for row in batch:
            if turn < len(row["turns"]):
                messages = [*row["messages"], {"role": "user", "content": row["turns"][turn]}]
                prompt = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
                if len(tokenizer(prompt, add_special_tokens=False).input_ids) <= LONGEST:
                    asked.append((row, messages, prompt))
        if not asked:
            break
        replies = reply([prompt for _, _, prompt in asked], model, tokenizer, new_tokens, way)
        for (row, messages, _), text in zip(asked, replies, strict=True):
            row["messages"] = [*messages, {"role": "assistant", "content": text}]
    for row in batch:
        row.pop("turns")


@torch.no_grad()
def reply(
    prompts: list[str], model: PreTrainedModel, tokenizer: Any, new_tokens: int, way: dict[str, Any]
) -> list[str]:
    tokenizer.padding_side = "left"
    read_in = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    generate: Any = model.generate
    written = generate(
        **read_in, max_new_tokens=new_tokens, pad_token_id=tokenizer.pad_token_id, **way
    )
    new = written[:, read_in["input_ids"].shape[1] :]
    texts: list[str] = tokenizer.batch_decode(new, skip_special_tokens=True)
    return texts


def finished(file: Path) -> set[str]:
    """Ids of the conversations in a file; a line that was cut off by a kill is removed."""
    if not file.exists():
        return set()
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    return {json.loads(line)["id"] for line in whole.splitlines()}


if __name__ == "__main__":
    main()
