"""One replica: an engine, and the same application over it as without Ray."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve

from kvprune.errors import PruneError
from kvprune.serve.fleet import Report, state_of
from kvprune.serve.ray.options import RayOptions

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.handle import DeploymentHandle

    from kvprune.serve.engine import Engine

BOARD_SECONDS = 2.0  # to wait for the others' reports
log = logging.getLogger("kvprune.serve")


class Replica:
    """Built in the process of the replica: nothing of it is sent there but its options."""

    def __init__(self, options: RayOptions, board: DeploymentHandle[Any]):
        self._options, self._board = options, board
        self.replica: str = serve.get_replica_context().replica_id.unique_id
        use_cores(options.threads)
        self._engine = open_engine(options)
        self._app = self._application()
        self._reporting = asyncio.get_running_loop().create_task(self._report())

    def _application(self) -> FastAPI:
        from kvprune.serve.api import create_app

        options = self._options
        return create_app(
            self._engine, keys=options.api_keys, local_names=options.local_names, fleet=self
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def check_health(self) -> None:
        """Ray replaces a replica that raises here three times."""
        if not self._engine.alive:
            raise PruneError(f"the engine has stopped: {self._engine.failure}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Shares of the rows and of the bytes, for scaling.py."""
        status = self._engine.status()
        rows = len(status.rows) / self._options.max_rows
        return {"rows": rows, "bytes": status.bytes / max(1, status.budget)}

    async def reports(self, metrics: bool = False) -> list[Report]:
        """Of all replicas; its own is of now, and the only one if the board cannot be reached."""
        others: list[Report] = []
        try:
            asked = self._board.reports.remote(metrics)
            others = await asyncio.wait_for(asked, BOARD_SECONDS)
        except Exception as error:  # whatever Ray raises: the others are then unknown
            log.warning("the reports of other replicas cannot be read: %s", type(error).__name__)
        others = [report for report in others if report.replica != self.replica]
        own = self._own_report()
        return [own if metrics else replace(own, metrics=()), *others]

    def _own_report(self) -> Report:
        import torch

        engine = self._engine
        return Report(
            replica=self.replica,
            alive=engine.alive,
            failure=engine.failure,
            pid=os.getpid(),
            threads=torch.get_num_threads(),
            state=state_of(engine.status()),
            metrics=self._app.state.service.metrics.families(),
        )

    async def _report(self) -> None:
        while True:
            try:
                await self._board.put.remote(self._own_report())
            except Exception as error:  # the board may be on its way to another node
                log.warning("the board cannot be reached: %s", type(error).__name__)
            await asyncio.sleep(self._options.report_seconds)

    async def __del__(self) -> None:
        """Ray calls it when the last request is over, or its time."""
        if not hasattr(self, "_reporting"):
            return
        self._reporting.cancel()
        with suppress(Exception):  # the board may be gone before
            await asyncio.wait_for(self._board.leave.remote(self.replica), BOARD_SECONDS)
        await asyncio.to_thread(self._engine.stop)


def use_cores(threads: int) -> None:
    """As many threads as cores; before torch and Numba are imported, which read it once."""
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def open_engine(options: RayOptions) -> Engine:
    """Load the model and start the engine's thread."""
    from kvprune.adapters.ready import load_served
    from kvprune.serve.engine import DEFAULT_SHARE, Engine
    from kvprune.serve.snapshot_folder import open_folder
    from kvprune.utils.memory import available

    served = load_served(
        (options.model, *options.beside), options.adapter, options.dtype, options.device,
        None if options.template is None else Path(options.template), log.info, options.kv,
        threshold=options.threshold, protect_recent=options.protect_recent,
    )  # fmt: skip
    # the other cores of this machine are there for other replicas, and so is their memory
    share = min(1.0, options.cpus / (os.cpu_count() or 1))
    if options.name and not options.beside:
        served = {options.name: next(iter(served.values()))}
    folder = options.snapshots and open_folder(options.snapshots, options.snapshot_limit)
    engine = Engine(
        served,
        budget=options.kv_budget or int(DEFAULT_SHARE * share * available()),
        kv=options.kv,
        max_rows=options.max_rows,
        chunk=options.chunk,
        prefix_budget=options.prefix_budget,
        admission=options.admission,
        max_waiting=options.max_waiting,
        snapshots=folder or None,
    )
    engine.start()
    return engine
