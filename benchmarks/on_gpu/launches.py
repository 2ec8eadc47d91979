"""What one more kernel costs: the assumption of the roofline, measured."""

import torch

from on_gpu.race import Contestant, Row, race
from on_gpu.sizes import Sizes

KERNELS = 100


def launch(device: torch.device, sizes: Sizes) -> list[Row]:
    """A hundred kernels that do nothing, from Python and in a graph; seconds of one."""
    x = torch.zeros(1, device=device)

    def from_python() -> torch.Tensor:
        for _ in range(KERNELS):
            x.add_(0)
        return x

    contestants = {"from Python": Contestant(from_python)}
    if device.type == "cuda":
        from_python()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            from_python()

        def replay() -> torch.Tensor:
            graph.replay()
            return x

        contestants["in a CUDA graph"] = Contestant(replay)
    rows = race(device, sizes.rounds, "launch", "one kernel", contestants)
    for row in rows:
        row["seconds"] /= KERNELS
    return rows
