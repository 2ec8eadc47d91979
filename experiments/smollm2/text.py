"""Text to teach SmolLM2 on: books, encyclopedic text, news and chats, and what is held out.

    python -m experiments.smollm2.text MODEL --corpus DIR --wikitext wikitext2_test.txt.gz

DIR holds *.jsonl.gz, one {"id", "text"} per line: books-*, *wikinews* and others, which count as
encyclopedic. OUT (runs/smollm2/text) gets train.jsonl, which `kvprune train` reads, one book and
some news articles that are not in it (held_out_book.txt, held_out_news.txt), and about.json.
Everything is chosen by hashes of ids: the same corpus gives the same files.

Documents have about 1,100 tokens or more, so that most rows of 1,024 are within one: long texts are
cut, short news are joined. Nothing that shares more than a few runs of 13 words with what is held
out, or with WikiText-2's test set, is trained on.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.smollm2.chats import conversations, messages, paragraphs
from kvprune.adapters.pretrained import load_tokenizer
from kvprune.errors import PruneError
from kvprune.evaluate.text_file import read_text
from kvprune.utils.files import write_atomically

SHARES = {"books": 0.3, "encyclopedic": 0.3, "news": 0.15, "chat": 0.25}
# about 4.4 characters per token: 1,100 and 4,100 tokens
SHORT, LONG = 4_800, 18_000
LEAST_TOKENS = 1_100
BOOK, NEWS = (250_000, 900_000), 300_000  # characters of the held-out texts
GRAM, COMMON = 13, 3


class Document(NamedTuple):
    kind: str
    name: str
    text: str

    @property
    def number(self) -> int:
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big")

    @property
    def for_chat(self) -> bool:
        return self.number % 4 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="whose tokenizer and chat template are used")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--wikitext", type=Path, required=True, help="the test set: .txt or .gz")
    parser.add_argument("--tokens", type=int, default=6_000_000)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2/text"))
    args = parser.parse_args()
    make(args.corpus, args.wikitext, load_tokenizer(args.model), args.tokens, args.out)


def make(corpus: Path, wikitext: Path, tokenizer: Any, tokens: int, out: Path) -> dict[str, Any]:
    """Write all files into the folder `out`; returns the content of about.json."""
    documents = sorted(read(corpus), key=lambda document: document.number)
    book = held_out_book(documents)
    news = held_out_news(documents)
    names = {book.name, *(article.name for article in news)}
    left = [document for document in documents if document.name not in names]
    held = {
        "held_out_book.txt": book.text,
        "held_out_news.txt": "\n\n\n".join(article.text for article in news),
    }
    forbidden = set(grams(read_text(wikitext)))
    for text in held.values():
        forbidden.update(grams(text))
    lines, counted = [], Counter[str]()
    for kind, share in SHARES.items():
        for document in pieces(left, kind, tokenizer):
            if counted[f"{kind}_tokens"] >= share * tokens:
                break
            if sum(gram in forbidden for gram in set(grams(document.text))) > COMMON:
                counted[f"{kind}_left_out"] += 1
                continue
            size = len(tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids)
            counted.update({f"{kind}_tokens": size, f"{kind}_documents": 1})
            counted[f"{kind}_short"] += size < LEAST_TOKENS
            row = {"id": document.name, "kind": kind, "text": document.text}
            lines.append(json.dumps(row, ensure_ascii=False))
        print(kind, {k: v for k, v in counted.items() if k.startswith(kind)}, flush=True)
    about = {**counted, "held_out_book": book.name, "held_out_news": [a.name for a in news]}
    out.mkdir(parents=True, exist_ok=True)
    files = {**held, "train.jsonl": "\n".join(lines) + "\n", "about.json": json.dumps(about)}
    for name, text in files.items():
        write_atomically(out / name, text.encode())
        print(f"wrote {out / name}: {len(text):,} characters")
    return about


def read(corpus: Path) -> Iterator[Document]:
    files = sorted(corpus.glob("*.jsonl.gz"))
    if not files:
        raise PruneError(f"{corpus} holds no *.jsonl.gz; pass the folder of the corpora")
    for file in files:
        kind = "news" if "wikinews" in file.name else "encyclopedic"
        kind = "books" if file.name.startswith("books-") else kind
        with gzip.open(file, "rt", encoding="utf-8") as opened:
            for line in opened:
                row = json.loads(line)
                yield Document(kind, row["id"], row["text"])


def held_out_book(documents: list[Document]) -> Document:
    """The first by number of those of medium length."""
    books = [d for d in documents if d.kind == "books" and BOOK[0] < len(d.text) < BOOK[1]]
    if not books:
        raise PruneError(
            f"no book has {BOOK[0]:,} to {BOOK[1]:,} characters; add books to the corpus"
        )
    return books[0]


def held_out_news(documents: list[Document]) -> list[Document]:
    """Long articles, so that contexts of thousands of tokens span few of them."""
    articles, size = [], 0
    for document in documents:
        if document.kind == "news" and len(document.text) > SHORT and size < NEWS:
            articles.append(document)
            size += len(document.text)
    if not articles:
        raise PruneError(f"no news article has {SHORT:,} characters; add a *wikinews*.jsonl.gz")
    return articles


def pieces(documents: list[Document], kind: str, tokenizer: Any) -> Iterator[Document]:
    """All training documents of this kind, in a fixed order."""
    if kind == "chat":
        parts = [part for d in documents if d.for_chat for part in cut(d)]
        parts.sort(key=lambda part: part.number)
        for name, turns in conversations(iter(parts), SHORT + 400):
            formatted = tokenizer.apply_chat_template(messages(turns), tokenize=False)
            yield Document("chat", name, formatted)
        return
    own = [document for document in documents if document.kind == kind and not document.for_chat]
    if kind == "news":
        yield from joined(own)
        return
    parts = [part for document in own for part in cut(document)]
    yield from sorted(parts, key=lambda part: part.number)


def cut(document: Document) -> Iterator[Document]:
    """At paragraphs, into about LONG characters; a rest below SHORT joins the piece before it.

    A short document is used in a chat only.
    """
    if len(document.text) < LONG + SHORT:
        if len(document.text) >= SHORT or document.for_chat:
            yield document
        return
    held: list[str] = []
    size, number, left = 0, 0, len(document.text)
    for paragraph in paragraphs(document.text):
        held.append(paragraph)
        size += len(paragraph) + 2
        left -= len(paragraph) + 2
        if size >= LONG and left >= SHORT:
            yield document._replace(name=f"{document.name} {number}", text="\n\n".join(held))
            held, size, number = [], 0, number + 1
    yield document._replace(name=f"{document.name} {number}", text="\n\n".join(held))


def joined(documents: list[Document]) -> Iterator[Document]:
    """Consecutive articles, joined until they are long enough."""
    held: list[Document] = []
    for document in documents:
        held.append(document)
        if sum(len(part.text) for part in held) >= SHORT + 400:
            text = "\n\n\n".join(part.text for part in held)
            yield held[0]._replace(text=text)
            held = []


def grams(text: str) -> Iterator[str]:
    """Runs of 13 words, without punctuation."""
    words = re.findall(r"\w+", text.lower())
    for start in range(len(words) - GRAM + 1):
        yield " ".join(words[start : start + GRAM])


if __name__ == "__main__":
    main()
