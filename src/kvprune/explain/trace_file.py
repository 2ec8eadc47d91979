"""A trace as a file: plain values for JSON, arrays for npz; format 1 had neither votes nor cost."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprune.errors import PruneError
from kvprune.explain.cost import Miss, Return
from kvprune.explain.votes import Votes
from kvprune.ops.never import NEVER
from kvprune.utils.files import write_atomically

if TYPE_CHECKING:
    from kvprune.explain.trace import Trace

FORMAT, READS = 2, (1, 2)
PLAIN = ("prompt", "kept_bytes", "dense_bytes", "model", "adapter", "settings", "dense")
TUPLES = ("tokens", "ids", "layers")
LOSSES = ("loss", "dense_loss", "open_loss")
RULES = ("threshold", "protect_first", "protect_recent")
BALLOTS = ("q_int", "k_int", "beta")


def to_plain(trace: Trace) -> dict[str, Any]:
    """Values that JSON has; NaN is null, and the step of a token that stays is -1."""
    values = {"format": FORMAT, **_about(trace)}
    values["drop_step"] = _steps(trace).tolist()
    for name in LOSSES:
        loss = getattr(trace, name)
        values[name] = None if loss is None else _with_null(loss)
    votes = trace.votes
    values["votes"] = votes and {
        **_rules(votes), **{name: _packed(getattr(votes, name)) for name in BALLOTS}
    }  # fmt: skip
    return values


def from_plain(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Trace, from what `to_plain` or `load` gives."""
    values = dict(values)
    if values.pop("format", None) not in READS:
        raise PruneError(f"this is not a trace of format 1 or {FORMAT}; write it with Trace.save")
    step = np.array(values.pop("drop_step"), dtype=np.int32)
    values["drop_step"] = np.where(step < 0, NEVER, step)
    for name in TUPLES:
        values[name] = tuple(values[name])
    for name in LOSSES:
        if values.get(name) is not None:
            values[name] = np.array(values[name], dtype=np.float32)
    if values.get("votes") is not None:
        votes = dict(values["votes"])
        values["votes"] = Votes(**votes | {name: _unpacked(votes[name]) for name in BALLOTS})
    values["misses"] = tuple(_miss(*miss) for miss in values.get("misses", ()))
    return values


def save(trace: Trace, file: Path) -> Path:
    if file.suffix == ".json":
        data = json.dumps(to_plain(trace), allow_nan=False).encode()
    elif file.suffix == ".npz":
        data = _archive(trace)
    else:
        raise PruneError(f"{file} ends neither in .json nor in .npz; use one of them for a trace")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, data)
    return file


def load(file: Path) -> dict[str, Any]:
    """The arguments of Trace."""
    try:
        if file.suffix != ".npz":
            return from_plain(json.loads(file.read_text(encoding="utf-8")))
        with np.load(file, allow_pickle=False) as archive:
            values = json.loads(archive["about"].tobytes())
            for name in ("drop_step", *LOSSES):
                if name in archive:
                    values[name] = archive[name]
            if values.get("votes") is not None:
                values["votes"] |= {name: archive[name] for name in BALLOTS}
        return from_plain(values)
    except FileNotFoundError as error:
        raise PruneError(f"{file} does not exist; write it with Trace.save") from error
    except PruneError as error:
        raise PruneError(f"{file}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise PruneError(f"{file} is not a trace or is damaged: {error}") from error


def _archive(trace: Trace) -> bytes:
    about = {"format": FORMAT, **_about(trace), "votes": trace.votes and _rules(trace.votes)}
    text = json.dumps(about, allow_nan=False).encode()
    arrays: dict[str, Any] = {"about": np.frombuffer(text, dtype=np.uint8)}
    arrays["drop_step"] = _steps(trace)
    arrays |= {name: getattr(trace, name) for name in LOSSES if getattr(trace, name) is not None}
    if trace.votes is not None:
        arrays |= {name: _half(getattr(trace.votes, name)) for name in BALLOTS}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _about(trace: Trace) -> dict[str, Any]:
    """What is plain already, in both kinds of file."""
    values: dict[str, Any] = {name: list(getattr(trace, name)) for name in TUPLES}
    values |= {name: getattr(trace, name) for name in PLAIN}
    # a named tuple is a list in JSON
    values["misses"] = [[*miss[:4], [list(back) for back in miss.returns]] for miss in trace.misses]
    return values


def _miss(token: int, loss: float, dense: float, opened: float, returns: list[list[Any]]) -> Miss:
    return Miss(token, loss, dense, opened, tuple(Return(*back) for back in returns))


def _rules(votes: Votes) -> dict[str, Any]:
    return {name: getattr(votes, name) for name in RULES}


def _steps(trace: Trace) -> np.ndarray:
    """-1 is shorter than NEVER."""
    steps: np.ndarray = np.where(trace.drop_step < NEVER, trace.drop_step, -1).astype(np.int32)
    return steps


def _with_null(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def _half(values: np.ndarray) -> np.ndarray:
    """float16, a 30th of a percent of error, unless a value is too large for it."""
    largest = np.abs(values).max(initial=0)
    return values if largest > np.finfo(np.float16).max else values.astype(np.float16)


def _packed(values: np.ndarray) -> dict[str, Any]:
    """An array in JSON: digits would be four times as long."""
    half = _half(values)
    data = base64.b64encode(half.astype(half.dtype.newbyteorder("<")).tobytes()).decode()
    return {"dtype": half.dtype.name, "shape": list(half.shape), "base64": data}


def _unpacked(values: dict[str, Any] | np.ndarray) -> np.ndarray:
    if isinstance(values, np.ndarray):
        return values
    if values["dtype"] not in ("float16", "float32"):
        raise ValueError(f"an array of {values['dtype']}")
    dtype = np.dtype(values["dtype"]).newbyteorder("<")
    data = base64.b64decode(values["base64"], validate=True)
    array: np.ndarray = np.frombuffer(data, dtype=dtype).reshape(values["shape"])
    return array
