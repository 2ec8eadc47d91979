"""Which documents are trained on, which validate a choice, and which are read once, at the end.

Six kinds of text are measured: WikiText-2, whose own parts are used, and a book, news, textbooks,
an encyclopedia and travel guides, of which documents are set aside by the hash of their id. So the
same corpus gives the same parts, and a document that is added moves no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from experiments.smollm2.text import BOOK, SHORT, Document, held_out_book, held_out_news

# of each kind in the id of a document, a share of 1 / SHARE validates, and another tests
FOLDERS = {"textbook": "/openstax/", "encyclopedia": "/wikipedia_", "travel": "/wikivoyage/"}
SHARE = 16
NEWS = 20  # articles that validate


class Parts(NamedTuple):
    """Documents of the corpus; `valid` and `test` by kind of text."""

    train: list[Document]
    valid: dict[str, list[Document]]
    test: dict[str, list[Document]]


def split(documents: Iterable[Document]) -> Parts:
    """No document is in two parts; order within a part is that of the hashes."""
    ordered = sorted(documents, key=lambda document: document.number)
    test_book, test_news = held_out_book(ordered), held_out_news(ordered)
    taken = {test_book.name, *(article.name for article in test_news)}
    left = [document for document in ordered if document.name not in taken]
    books = [d for d in left if d.kind == "books" and BOOK[0] < len(d.text) < BOOK[1]]
    news = [d for d in left if d.kind == "news" and len(d.text) > SHORT]
    valid = {"book": books[:1], "news": news[:NEWS]}
    test = {"book": [test_book], "news": test_news}
    for kind, folder in FOLDERS.items():
        own = [document for document in left if folder in document.name]
        valid[kind] = [document for document in own if document.number % SHARE == 1]
        test[kind] = [document for document in own if document.number % SHARE == 2]
    held = {d.name for part in (valid, test) for group in part.values() for d in group}
    return Parts([document for document in left if document.name not in held], valid, test)
