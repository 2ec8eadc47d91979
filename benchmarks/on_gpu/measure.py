"""All parts, one after the other."""

import gc
from collections.abc import Callable, Collection

import torch

from on_gpu import attention, launches, memory, whole
from on_gpu.race import Row
from on_gpu.sizes import Sizes

RUNS: dict[str, Callable[[torch.device, Sizes], list[Row]]] = {
    "launch": launches.launch,
    "decode": attention.decode,
    "model": whole.step,
    "prefill": attention.prefill,
    "train": attention.train,
    "memory": memory.train,
}


def measure(
    device: torch.device, sizes: Sizes, parts: Collection[str], tell: Callable[[str], None]
) -> list[Row]:
    rows: list[Row] = []
    for part, run in RUNS.items():
        if part in parts:
            tell(part)
            rows += run(device, sizes)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows
