"""The text shipped with the small model: two books to fine-tune on, one to evaluate on.

    python -m experiments.tiny_text --corpus DIR      writes src/kvprune/tiny/*.txt.gz

DIR as for pretrain_tiny.py. All three books are in the public domain in the United States.
"""

import argparse
import gzip
import json
from pathlib import Path

from experiments.pretrain_tiny import PACKAGE, STRAIGHT

BOOKS = {
    "train": ("pg1661_The_Adventures_of_Sherlock_Holmes", "Burnett_Garden_1911"),
    "held_out": ("pg55_The_Wonderful_Wizard_of_Oz",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    corpus = parser.parse_args().corpus
    documents = {}
    for path in sorted(corpus.glob("books-*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            documents |= {d["id"]: d["text"] for d in map(json.loads, lines)}
    PACKAGE.mkdir(parents=True, exist_ok=True)
    for name, books in BOOKS.items():
        # two blank lines separate documents
        texts = [text for book in books for key, text in documents.items() if book in key]
        data = "\n\n\n".join(texts).translate(STRAIGHT).encode()
        out = PACKAGE / f"{name}.txt.gz"
        # no name and no date in the header: the same text gives the same bytes
        out.write_bytes(gzip.compress(data, 9, mtime=0))
        print(f"{out.name}: {len(data):,} bytes of text, {out.stat().st_size:,} on disk")


if __name__ == "__main__":
    main()
