"""Zero-shot accuracy of a model on the paper's four tasks, through lm-eval, and its sparsity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprune.adapters.load import Loaded, load_with_tokenizer
from kvprune.config import to_dict
from kvprune.errors import PruneError
from kvprune.evaluate.dense import identity
from kvprune.evaluate.points import Points
from kvprune.integration.handle import Pruned
from kvprune.utils.files import write_atomically
from kvprune.utils.processes import ALONE, Group
from kvprune.version import __version__

if TYPE_CHECKING:
    from kvprune.evaluate.zeroshot.lm import PrunedLM

# what lm-eval calls them, where they come from the hub
HUB = {
    "winogrande": "winogrande",
    "hellaswag": "hellaswag",
    "piqa": "piqa",
    "lambada": "lambada_openai",
}
NAME = "zeroshot"
Limit = int | Mapping[str, int] | None  # samples per task: for all tasks, or {task: samples}


@dataclass(frozen=True)
class Scored:
    """One task, or "mean": the plain mean over the tasks."""

    task: str
    samples: int
    accuracy: float
    sparsity: float  # mean over the scored requests, one per choice: see `lm.PrunedLM`
    stderr: float | None = None  # of the accuracy
    accuracy_norm: float | None = None  # by the likelihood per byte of the choice, where defined
    perplexity: float | None = None  # of LAMBADA's last words

    def to_dict(self) -> dict[str, Any]:
        """Only what the task has."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def zeroshot(
    lm: PrunedLM,
    tasks: Sequence[str] = tuple(HUB),
    *,
    files: str | Path | None = None,
    limit: Limit = None,
    points: Points | None = None,
) -> list[Scored]:
    """One row per task, and their mean; `points` stores each task when it is done.

    Samples come from the hub, or from a folder with one file per task. `limit`: use only the first
    samples of each task, or {task: samples} for some of them.
    """
    limits = _limits(tasks, limit)
    rows = []
    for task, first in limits.items():

        def measure(task: str = task, first: int | None = first) -> list[dict[str, Any]]:
            done = _score(lm, task, files, first).to_dict()
            del done["task"]
            return [done]

        setting = {"task": task, "limit": first}
        row = points.measure(setting, measure)[0] if points else {**setting, **measure()[0]}
        rows.append(Scored(**{name: value for name, value in row.items() if name != "limit"}))
    count = len(rows)
    mean = Scored(
        "mean",
        sum(row.samples for row in rows),
        math.fsum(row.accuracy for row in rows) / count,
        math.fsum(row.sparsity for row in rows) / count,
    )
    return [*rows, mean]


def _limits(tasks: Sequence[str], limit: Limit) -> dict[str, int | None]:
    """How many of its first samples are scored, by task; None: all."""
    named = limit if isinstance(limit, Mapping) else {}
    for task in (*tasks, *named):
        if task not in HUB:
            raise PruneError(f"task {task!r} is unknown; there are {', '.join(HUB)}")
    for task, first in named.items():
        if task not in tasks:
            raise PruneError(
                f"a limit of {first} for {task}, which is not among the tasks; add it, or "
                f"leave the limit out"
            )
    limits = {task: named.get(task) if isinstance(limit, Mapping) else limit for task in tasks}
    for task, count in limits.items():
        if count is not None and count < 1:
            raise PruneError(f"{count} rows of {task} are too few; score at least 1")
    return limits


def _score(lm: PrunedLM, task: str, files: str | Path | None, limit: int | None) -> Scored:
    # not simple_evaluate, which also queries git, pip and the hub
    from lm_eval import evaluate

    lm.sparsities = []
    name, task_dict = load_task(task, files)
    # no bootstrap: the error of a mean has a formula
    output: Any = evaluate(lm, task_dict, limit=limit, bootstrap_iters=0, log_samples=False)
    result, samples = output["results"][name], output["n-samples"][name]["effective"]
    accuracy = float(result["acc,none"])
    assert lm.sparsity is not None
    return Scored(
        task,
        samples,
        accuracy,
        lm.sparsity,
        math.sqrt(accuracy * (1 - accuracy) / (samples - 1)) if samples > 1 else None,
        result.get("acc_norm,none"),
        result.get("perplexity,none"),
    )


def load_task(task: str, files: str | Path | None = None) -> tuple[str, Any]:
    """lm-eval's name for it, and the task with its rows in the form that lm-eval evaluates."""
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    from kvprune.evaluate.zeroshot.tasks import FOLDER

    own = Path(lm_eval.tasks.__file__).parent / task
    name, folder = (HUB[task], own) if files is None else (f"kvprune_{task}", FOLDER)
    # this folder only: searching all of lm-eval's takes seconds
    manager = TaskManager(
        include_path=str(folder), include_defaults=False, metadata={"files": files and str(files)}
    )
    try:
        loaded = manager.load([name])
    except PruneError:
        raise
    # whatever the libraries under lm-eval raise: datasets, httpx and fsspec have their own
    except Exception as error:
        if files is not None:
            raise
        reason = str(error).strip().splitlines()[0]
        raise PruneError(
            f"{task} cannot be read from the hub: {type(error).__name__}: {reason}; check the "
            f"network, or pass a folder with its file as --files"
        ) from error
    loaded["tasks"][name].set_config(key="num_fewshot", value=0)
    return name, loaded


@dataclass(frozen=True)
class Measured:
    """The rows, and how they were measured."""

    about: dict[str, Any]
    rows: list[Scored]

    def to_dict(self) -> dict[str, Any]:
        return {"about": self.about, "rows": [row.to_dict() for row in self.rows]}


def run(
    model: str,
    *,
    adapter: str | None = None,
    tasks: Sequence[str] = tuple(HUB),
    files: str | Path | None = None,
    limit: Limit = None,
    batch: int = 8,
    dtype: str = "auto",
    device: str | None = None,
    out: str | Path | None = None,
    group: Group = ALONE,
) -> Measured:
    """The same for a model by name; writes zeroshot.json into `out`, and .points.json meanwhile.

    Processes of a `group` share the requests of each task, and all return the same.
    """
    try:
        import lm_eval

        from kvprune.evaluate.zeroshot.lm import PrunedLM
    except ImportError as error:
        raise PruneError(
            f"zero-shot tasks need the package lm-eval ({error}); pip install 'kvprune[eval]'"
        ) from error
    _limits(tasks, limit)

    def prepare() -> Loaded:
        if files is not None:
            from kvprune.evaluate.zeroshot.tasks import read

            # find a bad file before the model is loaded, not after hours
            for task in tasks:
                read(files, task)
        return load_with_tokenizer(model, adapter, dtype, device)

    loaded = group.together(prepare)
    about = {
        "model": model,
        "adapter": adapter,
        "method": to_dict(loaded.model.config) if isinstance(loaded.model, Pruned) else None,
        "weights": identity(loaded.host),
        "files": None if files is None else str(files),
        "version": __version__,
        "lm_eval": lm_eval.__version__,
    }
    group.agree(lambda: about)
    folder = None if out is None else Path(out)
    points = None if folder is None else Points(folder / f"{NAME}.points.json", about, group)
    lm = PrunedLM(loaded, batch_size=batch, group=group)
    rows = zeroshot(lm, tasks, files=files, limit=limit, points=points)
    plain_limit = dict(limit) if isinstance(limit, Mapping) else limit
    measured = Measured({**about, "limit": plain_limit}, rows)
    if folder is not None and group.is_main:
        text = json.dumps(measured.to_dict(), indent=1, ensure_ascii=False)
        write_atomically(folder / f"{NAME}.json", text.encode())
    return measured
