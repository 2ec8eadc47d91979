"""Memory that was never written, made visible: NaN in floats, nonsense elsewhere."""

from unittest import mock

import torch

real_empty = torch.empty


def poisoned_empty(*args, **kwargs):
    x = real_empty(*args, **kwargs)
    return x.fill_(float("nan") if x.is_floating_point() else True if x.dtype == torch.bool else 99)


def poisoned():
    """A context in which `torch.empty` hands out poison."""
    return mock.patch.object(torch, "empty", poisoned_empty)
