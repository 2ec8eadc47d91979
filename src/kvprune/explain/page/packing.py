"""Arrays as text that browsers unpack: byte planes, deflate, base64."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

# the names that JavaScript has a typed array for
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32")
MISSING = -32768


def pack(values: np.ndarray, huffman: bool = False) -> dict[str, Any]:
    """An array of integers for the page; `unpack` of unpack.js reads it.

    huffman: without a search for repetitions, which noise does not have.
    """
    if values.dtype.name not in DTYPES:
        raise TypeError(f"{values.dtype} has no typed array")
    # all low bytes, then all high ones: the high ones are mostly alike, and so compress well
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    planes = np.frombuffer(little.tobytes(), dtype=np.uint8).reshape(-1, values.itemsize).T
    strategy = zlib.Z_HUFFMAN_ONLY if huffman else zlib.Z_DEFAULT_STRATEGY
    deflate = zlib.compressobj(9, zlib.DEFLATED, 15, 9, strategy)
    data = deflate.compress(planes.tobytes()) + deflate.flush()
    return {
        "type": values.dtype.name,
        "shape": list(values.shape),
        "data": base64.b64encode(data).decode(),
    }


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """What `pack` was given."""
    dtype = np.dtype(packed["type"]).newbyteorder("<")
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), dtype=np.uint8)
    little = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T)
    values: np.ndarray = little.reshape(-1).view(dtype).reshape(packed["shape"])
    return values.astype(packed["type"])


def quantise(values: np.ndarray, step: float) -> dict[str, Any]:
    """Numbers rounded to multiples of a step, which grows if they need more than 16 bits."""
    finite = np.isfinite(values)
    largest = float(np.abs(values[finite]).max(initial=0))
    step = max(step, largest / 32767)
    whole = np.round(np.where(finite, values, 0) / step)
    return {"step": step, **pack(np.where(finite, whole, MISSING).astype(np.int16))}


def pack_steps(steps: np.ndarray, start: np.ndarray, never: int) -> dict[str, Any]:
    """Steps as their distance from a start, which is smaller; 0 for those that never come."""
    reached = steps < never
    distance = np.where(reached, steps - start, 0)
    return pack(distance.astype(np.uint16 if distance.max(initial=0) < 2**16 else np.uint32))
