"""The highest memory of a training step of one layer's attention."""

import torch

from on_gpu.attention import learns, soft
from on_gpu.race import Row
from on_gpu.sizes import Sizes
from on_gpu.theirs import flash


def train(device: torch.device, sizes: Sizes) -> list[Row]:
    """Bytes beyond what was held before; a CPU does not count them."""
    rows = []
    for batch, length in sizes.texts:
        calls = {
            "kvprune": soft(device, sizes, batch, length, 0.3),
            "kvprune, plain torch": soft(device, sizes, batch, length, 0.3, "reference"),
            "flash attention": learns(device, sizes, batch, length, flash),
        }
        for name, call in calls.items():
            problem, peak = "", None
            try:
                peak = _peak(device, call)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                problem = f"does not run: {str(error).splitlines()[0][:100]}"
            rows.append({
                "part": "memory", "case": f"{batch} × {length:,}", "who": name,
                "problem": problem, "seconds": None, "bytes": peak, "all": [],
            })  # fmt: skip
    return rows


def _peak(device: torch.device, call) -> int | None:
    with torch.enable_grad():
        call()  # what is compiled or kept is not the step's
        if device.type == "cpu":
            return None
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
