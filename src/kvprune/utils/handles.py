"""Objects by number: what stands for a Python object in a compiled graph."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_NUMBERS = itertools.count(1)
_OBJECTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_handle(owner: Any) -> Tensor:
    """A number for the object, as a tensor: another object's number needs no other graph."""
    number = next(_NUMBERS)
    _OBJECTS[number] = owner
    return torch.tensor(number)


def owner_of(handle: Tensor) -> Any:
    """The object; a KeyError if it is gone."""
    return _OBJECTS[int(handle)]
