"""Documents from local files or from the Hugging Face hub, one string each.

Local files are read here rather than by `datasets`, so that nothing uses the network and errors
name the line; its JSON reader also turns text that looks like a date into a date.
"""

from __future__ import annotations

import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprune.errors import PruneError

KNOWN = (".txt", ".txt.gz", ".md", ".jsonl", ".jsonl.gz", ".json", ".parquet")

# the paper's corpora
NAMED = {
    "wikipedia": "legacy-datasets/wikipedia:20220301.en",
    "bookcorpus": "bookcorpus/bookcorpus:plain_text",
}
# a row of BookCorpus is a sentence, and the ends of the books are not marked
ROWS_PER_DOCUMENT = {"bookcorpus/bookcorpus": 1000}

HUB = re.compile(
    r"(?P<path>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.-]+))?"
)


@dataclass(frozen=True)
class Files:
    """Local files, sorted by name."""

    source: str
    files: tuple[Path, ...]

    def identity(self) -> list[Any]:
        """Changes when a file is added, removed or modified."""
        stats = [(file.resolve(), file.stat()) for file in self.files]
        return [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats]

    def documents(self, field: str, rows: int | None, streaming: bool) -> Iterator[str]:
        for file in self.files:
            try:
                yield from _read(file, field, rows or 1)
            except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                raise PruneError(
                    f"{file} is not gzip or is truncated ({error}); compress it again, or remove "
                    f".gz from its name"
                ) from error
            except OSError as error:
                raise PruneError(
                    f"{file} cannot be read: {error.strerror or error}; check its permissions"
                ) from error


@dataclass(frozen=True)
class Hub:
    """One split of a dataset of the hub."""

    source: str
    path: str
    config: str | None
    split: str

    def identity(self) -> list[Any]:
        """By name only: what was tokenised once needs no network again."""
        return [self.path, self.config, self.split]

    def documents(self, field: str, rows: int | None, streaming: bool) -> Iterator[str]:
        rows = rows or ROWS_PER_DOCUMENT.get(self.path, 1)
        texts = (
            _text(row, field, f"{self.source}, row {number}")
            for number, row in enumerate(self._rows(streaming), 1)
        )
        yield from _joined(texts, rows)

    def _rows(self, streaming: bool) -> Iterator[Any]:
        try:
            import datasets
        except ImportError as error:
            raise PruneError(
                f"{self.source} is on the hub, which needs the package datasets; "
                f"pip install 'kvprune[train]'"
            ) from error
        try:
            try:
                yield from datasets.load_dataset(
                    self.path, self.config, split=self.split, streaming=streaming
                )
            except RuntimeError as error:
                # a repository with a loading script; the hub also stores most of these as parquet
                if "scripts are no longer supported" not in str(error):
                    raise
                yield from datasets.load_dataset(
                    self.path,
                    data_files={self.split: f"{self.config or '*'}/{self.split}/*.parquet"},
                    revision="refs/convert/parquet",
                    split=self.split,
                    streaming=streaming,
                )
        except datasets.exceptions.DatasetNotFoundError as error:
            raise PruneError(
                f"{self.source} is neither a local file or folder nor an open dataset of the hub; "
                f"check the name, or `hf auth login` if the dataset requires access"
            ) from error
        except ConnectionError as error:
            raise PruneError(
                f"{self.source} is not a local file or folder, and the hub cannot be reached "
                f"({error}); check the network, or download it elsewhere and pass its files"
            ) from error
        # the libraries under `datasets` raise their own types: httpx, fsspec, pyarrow
        except Exception as error:
            raise PruneError(
                f"{self.source} cannot be read from the hub: {type(error).__name__}: {error}; "
                f"a source is written owner/name:config@split"
            ) from error


def find(source: str) -> Files | Hub:
    """A source by name: a file, a folder, a pattern such as books/*.txt, or a hub dataset."""
    path = Path(source).expanduser()
    if path.is_dir():
        return Files(source, _inside(path))
    if path.exists():
        if not _known(path):
            raise PruneError(f"{source} is of an unknown type; known are {', '.join(KNOWN)}")
        return Files(source, (path,))
    if glob.has_magic(source):
        return Files(source, _matching(source, path))
    match = HUB.fullmatch(NAMED.get(source, source))
    if match is None or _known(path):
        raise PruneError(
            f"{source} does not exist; pass a file, a folder, a pattern such as 'books/*.txt', "
            f"{' or '.join(NAMED)}, or a hub dataset as owner/name:config@split"
        )
    return Hub(source, match["path"], match["config"], match["split"] or "train")


def _known(file: Path) -> bool:
    return file.name.lower().endswith(KNOWN)


def _inside(folder: Path) -> tuple[Path, ...]:
    candidates = [
        file
        for file in folder.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    files = sorted((file for file in candidates if _known(file)), key=lambda file: file.as_posix())
    if not files:
        raise PruneError(
            f"none of the {len(candidates)} files in {folder} is of a known type: "
            f"{', '.join(KNOWN)}"
            if candidates
            else f"the folder {folder} is empty; put files into it: {', '.join(KNOWN)}"
        )
    return tuple(files)


def _matching(source: str, pattern: Path) -> tuple[Path, ...]:
    files: set[Path] = set()
    for name in glob.glob(str(pattern), recursive=True):
        path = Path(name)
        if path.is_dir() and not source.rstrip("/").endswith("**"):
            files.update(_inside(path))
        elif path.is_file() and _known(path):
            files.add(path)
    if not files:
        raise PruneError(f"{source} matches no file of a known type: {', '.join(KNOWN)}")
    return tuple(sorted(files, key=lambda file: file.as_posix()))


def _read(file: Path, field: str, rows: int) -> Iterator[str]:
    name = file.name.lower().removesuffix(".gz")
    if name.endswith((".txt", ".md")):
        return iter([_plain(file)])
    if name.endswith(".jsonl"):
        return _joined(_lines(file, field), rows)
    if name.endswith(".json"):
        return _joined(_json(file, field), rows)
    return _joined(_parquet(file, field), rows)


def _open(file: Path) -> Any:
    return gzip.open(file) if file.name.lower().endswith(".gz") else open(file, "rb")


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PruneError(
            f"{where} is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start}): binary, "
            f"or in another encoding; convert it, for example with iconv -f latin1 -t utf-8"
        ) from error


def _plain(file: Path) -> str:
    with _open(file) as opened:
        text = _decoded(opened.read(), str(file))
    if "\0" in text:
        raise PruneError(
            f"{file} holds zero bytes: binary or UTF-16, not UTF-8 text; convert it, for example "
            f"with iconv -f utf-16 -t utf-8"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(file: Path, field: str) -> Iterator[str]:
    with _open(file) as opened:
        for number, line in enumerate(opened, 1):
            where = f"{file}, line {number}"
            decoded = _decoded(line, where).strip()
            if decoded:
                yield _text(_parsed(decoded, where), field, where)


def _json(file: Path, field: str) -> Iterator[str]:
    """A list of objects, one object, or JSON lines in a file named .json."""
    content = _decoded(file.read_bytes(), str(file))
    try:
        value = json.loads(content) if content.strip() else []
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise _not_json(f"{file}, line {error.lineno}", error) from error
        yield from _lines(file, field)
        return
    for number, row in enumerate(value if isinstance(value, list) else [value], 1):
        yield _text(row, field, f"{file}, item {number}")


def _parquet(file: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise PruneError(
            f"{file} needs the package pyarrow; pip install 'kvprune[train]'"
        ) from error
    try:
        with pq.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            if field not in names:
                raise _no_field(str(file), field, names)
            number = 0
            for batch in opened.iter_batches(batch_size=1000, columns=[field]):
                for value in batch.column(0):
                    number += 1
                    yield _text({field: value.as_py()}, field, f"{file}, row {number}")
    except (pa.ArrowException, OSError) as error:
        raise PruneError(f"{file} is not parquet or is damaged: {error}; write it again") from error


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise _not_json(where, error) from error


def _text(row: Any, field: str, where: str) -> str:
    """The text of a row; a missing value (null) is an empty text."""
    if not isinstance(row, dict):
        raise PruneError(
            f'{where} is {_kind(row)}, not an object with fields; write it as {{"{field}": "..."}}'
        )
    if field not in row:
        raise _no_field(where, field, list(row))
    text = row[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise PruneError(f"{field!r} in {where} is {_kind(text)}, not text; choose another field")
    # JSON can contain half a surrogate pair, which no tokenizer accepts
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
        raise PruneError(
            f"{field!r} in {where} holds half a character (\\ud800 to \\udfff); fix it"
        )
    return text


def _joined(texts: Iterable[str], rows: int) -> Iterator[str]:
    """Documents of `rows` consecutive texts, one line each."""
    if rows == 1:
        yield from texts
        return
    lines: list[str] = []
    for text in texts:
        lines.append(text.removesuffix("\n"))
        if len(lines) == rows:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:40]})"


def _no_field(where: str, field: str, names: list[str]) -> PruneError:
    return PruneError(
        f"{where} has no field {field!r}, only {', '.join(map(str, names)) or 'none'}; "
        f"choose one of these as text_field"
    )


def _not_json(where: str, error: json.JSONDecodeError) -> PruneError:
    return PruneError(f"{where} is not JSON ({error.msg}, column {error.colno}); fix the line")
