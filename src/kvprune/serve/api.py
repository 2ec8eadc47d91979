"""The server as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI

from kvprune.serve import completions, pins, views
from kvprune.serve.errors import add_handlers
from kvprune.serve.fleet import Fleet
from kvprune.serve.limits import Limits
from kvprune.serve.seam import ServingEngine
from kvprune.serve.security import Keys, LocalNames, Outermost
from kvprune.serve.service import Service
from kvprune.version import __version__

DEFAULT_LIMITS = Limits()


def create_app(
    engine: ServingEngine,
    *,
    keys: Sequence[str] = (),
    limits: Limits = DEFAULT_LIMITS,
    local_names: Sequence[str] | None = None,
    fleet: Fleet | None = None,
) -> FastAPI:
    """OpenAI's API over an engine that somebody else starts and stops.

    `local_names`: the names by which a server on this machine alone may be called, beside localhost
    and IP addresses; None: any. A server with keys needs none. `fleet`: the replicas of which this
    is one, for the views.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.open()
        yield
        service.close()

    app = FastAPI(
        title="kvprune",
        version=__version__,
        summary="OpenAI's API over a model that forgets what it no longer needs.",
        lifespan=lifespan,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
    )
    service = Service(engine, limits, fleet)
    app.state.service, app.state.limits = service, limits
    add_handlers(app)
    for router in (completions.router, pins.router, views.router):
        app.include_router(router)
    # the last one that is added is the first to see a request
    app.add_middleware(Keys, keys=tuple(keys))
    if local_names is not None and not keys:
        app.add_middleware(LocalNames, names=tuple(local_names))
    app.add_middleware(Outermost, answered=service.metrics.answered)
    return app
