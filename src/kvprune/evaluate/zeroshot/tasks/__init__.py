"""The four tasks of the paper from local files, as lm-eval's tasks in this folder read them.

lm-eval 0.4 knows only its own models: no entry points, and `--include_path` is for tasks. But a
task that is given to it as a file is loaded before the model, and with it this module, which makes
the model `kvprune` known:

    lm_eval --model kvprune --model_args pretrained=M,adapter=A \
        --tasks .../evaluate/zeroshot/tasks/piqa.yaml --metadata '{"files": "DIR"}'
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprune.errors import PruneError

if TYPE_CHECKING:
    import datasets

FOLDER = Path(__file__).parent
TASKS = ("winogrande", "hellaswag", "piqa", "lambada")
ENDINGS = (".jsonl", ".jsonl.gz", ".json")
SPLIT = "validation"
Row = dict[str, Any]


def register() -> None:
    """Make `--model kvprune` known to lm-eval; the class is imported when it is used."""
    # it fills its list of models only if that is empty, so let it do so first
    import lm_eval.models  # noqa: F401
    from lm_eval.api.registry import model_registry

    if "kvprune" not in model_registry:
        model_registry.register("kvprune", target="kvprune.evaluate.zeroshot.lm:PrunedLM")


def find(folder: str | Path, task: str) -> Path:
    """The one file of the folder whose name begins with that of the task."""
    path = Path(folder)
    if not path.is_dir():
        raise PruneError(f"{path} is no folder; pass one with files such as {task}.jsonl")
    files = sorted(f for f in path.glob(f"{task}*") if f.name.lower().endswith(ENDINGS))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise PruneError(
            f"{path} must hold one file {task}* ({', '.join(ENDINGS)}); found: {names}"
        )
    return files[0]


def read(folder: str | Path, task: str) -> list[Row]:
    """The rows of a task with the fields that its prompts use, checked."""
    file = find(folder, task)
    rows = []
    for number, row in enumerate(_parsed(file), 1):
        where = f"{file}, row {number}"
        if not isinstance(row, dict):
            raise PruneError(f"{where} is {type(row).__name__}, not an object with fields")
        rows.append(FORMS[task](row, where))
    if not rows:
        raise PruneError(f"{file} holds no rows; write one JSON object per line")
    return rows


def _parsed(file: Path) -> Iterator[Any]:
    opened = gzip.open if file.name.lower().endswith(".gz") else open
    try:
        with opened(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise PruneError(
                            f"{file}, line {number} is not JSON ({error}); write one object "
                            f"per line"
                        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise PruneError(f"{file} cannot be read: {error}; write it again") from error


def _text(row: Row, field: str, where: str) -> str:
    if field not in row:
        raise PruneError(f"{where} has no field {field!r}, only {', '.join(row) or 'none'}")
    if not isinstance(row[field], str) or not row[field].strip():
        raise PruneError(f"{field!r} in {where} is {row[field]!r}; it must be text")
    return str(row[field])


def _choice(row: Row, field: str, where: str, choices: int, first: int = 0) -> int:
    """The number of the right choice, from 0; files write it as a number or as text."""
    if field not in row:
        raise PruneError(f"{where} has no field {field!r}, only {', '.join(row) or 'none'}")
    known = {str(first + i): i for i in range(choices)}
    if str(row[field]) not in known:
        raise PruneError(f"{field!r} in {where} is {row[field]!r}; it must be {' or '.join(known)}")
    return known[str(row[field])]


def _winogrande(row: Row, where: str) -> Row:
    fields: Row = {name: _text(row, name, where) for name in ("sentence", "option1", "option2")}
    if fields["sentence"].count("_") != 1:
        raise PruneError(f"'sentence' in {where} must have one _ for the options to fill")
    return {**fields, "answer": str(_choice(row, "answer", where, 2, first=1) + 1)}


def _hellaswag(row: Row, where: str) -> Row:
    """The prompt as `query`, or in the original parts, which lm-eval joins with a capital."""
    from lm_eval.tasks.hellaswag.utils import preprocess

    query = row.get("query")
    if query is None:
        parts = {name: _text(row, name, where) for name in ("activity_label", "ctx_a")}
        tail = str(row.get("ctx_b") or "").capitalize()
        query = f"{parts['activity_label']}: {parts['ctx_a']} {tail}"
    else:
        query = _text(row, "query", where)
    endings = row.get("endings")
    if not isinstance(endings, list) or not all(isinstance(end, str) for end in endings):
        raise PruneError(f"{where} has no list of texts in the field 'endings'")
    label = _choice(row, "label", where, len(endings))
    return {
        "query": preprocess(query),
        "choices": [preprocess(end) for end in endings],
        "label": label,
    }


def _piqa(row: Row, where: str) -> Row:
    fields: Row = {name: _text(row, name, where) for name in ("goal", "sol1", "sol2")}
    return {**fields, "label": _choice(row, "label", where, 2)}


def _lambada(row: Row, where: str) -> Row:
    text = _text(row, "text", where)
    if " " not in text.strip():
        raise PruneError(f"'text' in {where} is one word; the last of several is to be predicted")
    return {"text": text}


FORMS: dict[str, Callable[[Row, str], Row]] = {
    "winogrande": _winogrande,
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "lambada": _lambada,
}


def load_task(
    task: str = "", files: str | Path | None = None, **others: Any
) -> dict[str, datasets.Dataset]:
    """Called by lm-eval: `task` comes from the task's file, `files` from --metadata."""
    import datasets

    if files is None:
        raise PruneError(
            f'where are the files of {task}? Name their folder: --metadata \'{{"files": "DIR"}}\''
        )
    return {SPLIT: datasets.Dataset.from_list(read(files, task))}


register()
