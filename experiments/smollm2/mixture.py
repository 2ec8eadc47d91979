"""Text for long training: seven kinds, the chats of answers.py among them, and what is held out.

    python -m experiments.smollm2.mixture MODEL --corpus DIR --eval DIR --chats FILE --out OUT

OUT gets train.jsonl, {"id", "kind", "text"} per line; valid_KIND.txt and test_KIND.txt of the six
kinds of text of held_out.py (WikiText-2's own come from --eval); about.json. Nothing that shares
more than a few runs of 13 words with a held-out text is trained on. Chats are repeated up to three
times to fill their share; the others of text.py are chosen by hashes, so the same corpus gives the
same files. Code is that of Python's own library.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.smollm2.held_out import Parts, split
from experiments.smollm2.repeats import edited, pairs
from experiments.smollm2.text import COMMON, Document, cut, grams, joined, pieces, read
from kvprune.adapters.pretrained import load_tokenizer
from kvprune.errors import PruneError
from kvprune.evaluate.text_file import read_text
from kvprune.utils.files import write_atomically

SHARES = {
    "own_chats": 0.22, "textbooks": 0.16, "encyclopedic": 0.18, "repeats": 0.15, "books": 0.13,
    "news": 0.08, "code": 0.04, "chat": 0.04,
}  # fmt: skip
EPOCHS = 3  # of the model's own chats, at most


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="whose tokenizer and chat template are used")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--eval", type=Path, required=True, help="wikitext2_valid and _test, .gz")
    parser.add_argument("--chats", type=Path, required=True, help="written by answers.py")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    parts = split(read(args.corpus))
    wikitext = {part: read_text(wikitext_file(args.eval, part)) for part in ("valid", "test")}
    held = held_texts(parts, wikitext)
    tokenizer = load_tokenizer(args.model)
    lines, counted = mixed(parts.train, args.chats, tokenizer, args.tokens, held)
    files = {f"{name}.txt": text for name, text in held.items()}
    about = {**counted, "valid": _names(parts.valid), "test": _names(parts.test)}
    files |= {"train.jsonl": "\n".join(lines) + "\n", "about.json": json.dumps(about)}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomically(args.out / name, text.encode())
        print(f"wrote {args.out / name}: {len(text):,} characters")


def wikitext_file(folder: Path, part: str) -> Path:
    found = sorted(folder.glob(f"wikitext2_{part}*"))
    if not found:
        raise PruneError(f"{folder} has no wikitext2_{part}; pass the folder of the test texts")
    return found[0]


def held_texts(parts: Parts, wikitext: dict[str, str]) -> dict[str, str]:
    """Name of the file (valid_book, …) to its text."""
    texts = {}
    for part in ("valid", "test"):
        texts[f"{part}_wikitext"] = wikitext[part]
        for kind, documents in getattr(parts, part).items():
            texts[f"{part}_{kind}"] = "\n\n\n".join(document.text for document in documents)
    return texts


def mixed(
    train: list[Document], chats: Path, tokenizer: Any, tokens: int, held: dict[str, str]
) -> tuple[list[str], dict[str, int]]:
    """Lines of train.jsonl, and how many tokens and documents of each kind."""
    forbidden = {gram for text in held.values() for gram in grams(text)}
    lines, counted = [], Counter[str]()
    for kind, share in SHARES.items():
        for name, text in texts_of(kind, train, chats, tokenizer):
            if counted[f"{kind}_tokens"] >= share * tokens:
                break
            if sum(gram in forbidden for gram in set(grams(text))) > COMMON:
                counted[f"{kind}_left_out"] += 1
                continue
            size = len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
            counted.update({f"{kind}_tokens": size, f"{kind}_documents": 1})
            row = {"id": name, "kind": kind, "text": text}
            lines.append(json.dumps(row, ensure_ascii=False))
        print(kind, {k: v for k, v in counted.items() if k.startswith(kind)}, flush=True)
    return lines, dict(counted)


def texts_of(
    kind: str, train: list[Document], chats: Path, tokenizer: Any
) -> Iterator[tuple[str, str]]:
    """Name and text of all there is of a kind."""
    textbooks = [document for document in train if "/openstax/" in document.name]
    others = [document for document in train if "/openstax/" not in document.name]
    if kind == "own_chats":
        yield from own_chats(chats, tokenizer)
    elif kind == "textbooks":
        # short sections are joined, as news are
        short = [document for document in textbooks if len(document.text) < 20_000]
        yield from ((d.name, d.text) for d in joined(short))
        yield from ((p.name, p.text) for d in textbooks if d not in short for p in cut(d))
    elif kind == "repeats":
        some = [d for d in train if d.number % 3 == 0 and len(d.text) > 2_000]
        yield from pairs([(f"{d.name} again", d.text[:60_000]) for d in some])
    elif kind == "code":
        yield from code()
    else:
        yield from ((d.name, d.text) for d in pieces(others, kind, tokenizer))


def own_chats(file: Path, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Each conversation with the template around it, in several epochs."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for epoch in range(EPOCHS):
        for row in rows:
            if row["messages"] and row["messages"][-1]["role"] == "assistant":
                text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
                # the same text twice in a row would be a lesson in copying
                yield f"{row['id']} epoch {epoch}", text


def code() -> Iterator[tuple[str, str]]:
    """Modules of Python's library, and their functions with an edit."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        if 4_000 < len(text) < 60_000:
            yield file.name, text[:16_000]
            for number, pair in enumerate(edited(file.name, text)):
                yield f"{file.name} {number}", pair


def _names(part: dict[str, list[Document]]) -> dict[str, list[str]]:
    return {kind: [document.name for document in documents] for kind, documents in part.items()}


if __name__ == "__main__":
    main()
