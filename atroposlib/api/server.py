"""The trajectory API as an app: store, service, routes and middleware put together.

`create_app` builds a server; `app` is one for `uvicorn atroposlib.api:app`, with its state in `ATROPOS_STATE_DIR` or,
without that variable, in memory. `run-api` is the usual way to start it.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from atroposlib.api.answers import add_error_answers
from atroposlib.api.delivery import Connections
from atroposlib.api.hot_routes import DirectRoutes, add_hot_routes
from atroposlib.api.middleware import BodyReader, Gate
from atroposlib.api.routes import add_routes
from atroposlib.api.service import TrajectoryService
from atroposlib.api.store import MemoryStore, Store

MEGABYTE = 1_000_000
STATE_DIR_VARIABLE = "ATROPOS_STATE_DIR"


@dataclass(frozen=True)
class ApiSettings:
    """How a server runs. `state_dir` None: in memory. `check_host`: refuse Host headers that are names of others."""

    state_dir: Path | None = None
    token: str | None = None
    env_timeout_s: float = 300.0
    max_body_mb: float = 100.0
    max_queue_mb: float | None = None
    check_host: bool = False


def create_app(settings: ApiSettings) -> FastAPI:
    """A server with its own store; closing the app's lifespan flushes and closes it.

    Raises:
        PathError, ConfigError: the state folder cannot be used, or another server uses it.
    """
    service = TrajectoryService(_open_store(settings), env_timeout_s=settings.env_timeout_s)
    connections = Connections()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.store.close()

    api = FastAPI(title="Atropos trajectory API", version="0.5.0", lifespan=lifespan)
    api.state.service = service
    api.state.connections = connections
    api.state.reading = asyncio.Lock()
    add_routes(api)
    api.add_middleware(DirectRoutes, routes=add_hot_routes(api))
    add_error_answers(api)
    api.add_middleware(BodyReader, max_bytes=int(settings.max_body_mb * MEGABYTE))
    api.add_middleware(
        Gate, token=settings.token, check_host=settings.check_host, metrics=service.metrics, connections=connections
    )
    return api


def _open_store(settings: ApiSettings) -> Store:
    max_bytes = None if settings.max_queue_mb is None else int(settings.max_queue_mb * MEGABYTE)
    if settings.state_dir is None:
        return MemoryStore(max_bytes)
    from atroposlib.api.disk import DiskStore

    return DiskStore(settings.state_dir, max_bytes)


app = create_app(
    ApiSettings(state_dir=Path(os.environ[STATE_DIR_VARIABLE]) if os.environ.get(STATE_DIR_VARIABLE) else None)
)
