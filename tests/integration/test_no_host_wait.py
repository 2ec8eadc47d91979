"""A decode step on a GPU makes no call that waits for it.

The model is on the device "meta", whose tensors have no numbers: to ask for one (`item`, `bool`,
`nonzero`, a mask as an index) or to copy it to the CPU raises. All that Python does in a step is
done as on a GPU, but for the kernels, which are only counted. What cannot be seen: a wait inside of
a launch or of the allocator, and what `generate` does between steps.
"""

import pytest
import torch

import kvprune
import zoo
from kvprune import PrunedCache, PruningConfig
from kvprune.cache import lengths
from kvprune.cache.extents import ExtentTable
from kvprune.ops.decode import DECODE
from kvprune.ops.dispatch import BACKENDS

triton_kernels = pytest.importorskip("kvprune.ops.decode.triton_kernels", exc_type=ImportError)


class Kernel:
    """In place of a kernel."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __getitem__(self, grid):
        return lambda *args, **options: self.log.append(self.name)


class NeverArrives:
    """In place of a copy to pinned memory, which nobody waits for."""

    def __init__(self, numbers):
        assert numbers.is_meta

    def arrived(self):
        return False


@pytest.fixture
def launches(monkeypatch):
    """The kernels that were launched."""
    log = []
    for name in ("attend", "combine", "plan", "move"):
        monkeypatch.setattr(triton_kernels, name, Kernel(name, log))
    monkeypatch.setattr(lengths, "Read", NeverArrives)
    monkeypatch.setitem(BACKENDS, "triton", BACKENDS["triton"]._replace(device="meta"))
    monkeypatch.setattr(DECODE, "_chosen", {})
    # there is no autocast for this device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    return log


def decode_steps(name, config, **options):
    """Three tokens for each of two rows, with a mask, as `generate` brings them."""
    model = zoo.make(name).eval()
    cache = PrunedCache(kvprune.attach(model, config), **options)
    model.to("meta")
    with torch.device("meta"), torch.no_grad():
        for length in range(1, 4):
            ids, mask = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, length)
            model(ids, attention_mask=mask.long(), past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("options", [{}, {"kv": "int8", "budget": "1GB"}], ids=str)
def test_a_step_does_not_wait(name, options, launches):
    cache = decode_steps(name, PruningConfig(rank=4), **options)
    tables = [store.table for store in cache.stores]
    assert all(isinstance(table, ExtentTable) for table in tables)
    assert launches == ["attend", "plan", "move"] * 3 * len(tables)
    assert [table._most.tolist() for table in tables] == [[3, 3]] * len(tables)
    # whoever asks for the numbers does wait
    with pytest.raises((RuntimeError, NotImplementedError)):
        cache.kept.tolist()


def test_slots_wait(launches):
    """The paper's structure, by the torch reference: what the test above would see."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        decode_steps("gpt2", PruningConfig(rank=4), store="slots")
