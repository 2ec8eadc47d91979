"""Make uninitialised memory visible: NaN in floats, arbitrary values elsewhere."""

from unittest import mock

import torch

real_empty = torch.empty


def poisoned_empty(*args, **kwargs):
    x = real_empty(*args, **kwargs)
    return x.fill_(float("nan") if x.is_floating_point() else True if x.dtype == torch.bool else 99)


def poisoned():
    """A context in which `torch.empty` returns poisoned tensors."""
    return mock.patch.object(torch, "empty", poisoned_empty)
