"""The trajectory API as an app, and all its routes.

`create_app` builds a server; `app` is one for `uvicorn atroposlib.api:app`, with its state in `ATROPOS_STATE_DIR` or,
without that variable, in memory. `run-api` is the usual way to start it.
"""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import APIRouter, Body, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from pydantic import StrictInt, ValidationError

from atroposlib.api import schemas
from atroposlib.api.batches import BatchResponse
from atroposlib.api.edge import (
    BODY_KEY,
    BodyReader,
    Gate,
    add_error_responses,
    is_binary,
    json_response,
)
from atroposlib.api.group_checks import EncodedGroup, read_binary, read_group, read_list
from atroposlib.api.group_codec import GROUP_KEYS
from atroposlib.api.protocol import CONNECTION_KEY, Strangers
from atroposlib.api.schemas import EnvIdentifier, Info, Refused, RegisterEnv, Registration, ScoredData, Status
from atroposlib.api.service import TrajectoryService
from atroposlib.api.store import Store

MEGABYTE = 1_000_000
STATE_DIR_VARIABLE = "ATROPOS_STATE_DIR"
RUN_HEADER = "X-Atropos-Run"

__all__ = ["EnvIdentifier", "Info", "RegisterEnv", "Registration", "ScoredData", "Status", "app", "create_app"]
"""The payloads' names are here for those who import them as from `atroposlib` 0.4.0."""

app: FastAPI


def create_app(
    state_dir: Path | None = None,
    *,
    accept_older: bool = False,
    token: str | None = None,
    env_timeout_s: float = 300.0,
    max_body_mb: float = 100.0,
    max_queue_mb: float = math.inf,
    check_host: bool = False,
) -> FastAPI:
    """A server with its own store; closing the app's lifespan flushes and closes it.

    Args:
        state_dir: None keeps everything in memory.
        accept_older: use the folder although it is older than its last server left it.
        check_host: refuse Host headers that are names of others.

    PathError, ConfigError: the state folder cannot be used. LaunchError: another server uses it.
    """
    store = Store(state_dir, max_queue_mb * MEGABYTE, accept_older=accept_older)
    service = TrajectoryService(store, env_timeout_s=env_timeout_s)
    strangers = Strangers()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.store.close()

    api = FastAPI(title="Atropos trajectory API", version="0.5.0", lifespan=lifespan, responses=_OF_EVERY_ROUTE)
    api.state.service = service
    api.state.strangers = strangers
    api.state.reading = asyncio.Lock()
    api.include_router(_routes)
    add_error_responses(api)
    api.add_middleware(BodyReader, max_bytes=int(min(max_body_mb * MEGABYTE, 1 << 62)))  # it may be infinite
    api.add_middleware(Gate, token=token, check_host=check_host, metrics=service.live.metrics, strangers=strangers)
    return api


async def _service(request: Request) -> TrajectoryService:
    return request.app.state.service


Service = Annotated[TrajectoryService, Depends(_service)]


_routes = APIRouter()
"""Matched in this order, so what is asked most comes first."""

_OF_EVERY_ROUTE: dict[int | str, dict[str, object]] = {
    400: {"description": "The body is no JSON, or no gzip."},
    401: {"description": "The server needs a token; /health alone does not."},
    403: {"description": "A request of another site's page, or to a server without a token from elsewhere."},
    404: {"description": "Unknown environment or batch."},
    409: {"description": "The environment has disconnected, or queued groups do not fit."},
    413: {"description": "The body is too large."},
    415: {"description": "The body is of another type."},
    503: {"description": "No room on the disk, or groups cannot be read now: ask again later."},
}


_SCORED_DATA = "#/components/schemas/ScoredData"
_UNFIT = {"422": {"description": "The body or a parameter is not as described."}}


def _takes(schema: dict[str, object]) -> dict[str, object]:
    """OpenAPI of a route that reads its body itself."""
    says = "`run_id` of /register-env; groups of a run that was reset are refused."
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "parameters": [{"name": RUN_HEADER, "in": "header", "schema": {"type": "string"}, "description": says}],
        "responses": _UNFIT,
    }


_NAMES_ENV: dict[str, object] = {
    "requestBody": {"content": {"application/json": {"schema": schemas.EnvIdentifier.model_json_schema()}}},
    "parameters": [{"name": "env_id", "in": "query", "schema": {"type": "integer", "minimum": 0}}],
    "responses": _UNFIT,
}


@_routes.get("/status-env", response_model=schemas.EnvStatus, openapi_extra=_NAMES_ENV)
async def status_env(request: Request) -> Response:
    """Return what an environment bases its back-pressure on. The id comes as a JSON body or in the query."""
    service: TrajectoryService = request.app.state.service
    return json_response(service.env_status(_asking_env(request)))


@_routes.post("/scored_data", response_model=schemas.Received, openapi_extra=_takes({"$ref": _SCORED_DATA}))
async def scored_data(request: Request) -> Response:
    """Store one group. The answer comes when it is on disk; 503 when there is no room: try again later."""
    (receipt,) = await _store_groups(request, [await _in_turn(request, read_group)])
    return json_response(receipt.model_dump(exclude_none=True))


@_routes.post(
    "/scored_data_list",
    response_model=schemas.ReceivedList,
    openapi_extra=_takes({"type": "array", "items": {"$ref": _SCORED_DATA}}),
)
async def scored_data_list(request: Request) -> Response:
    """Store several groups, all or none."""
    groups = await _in_turn(request, read_binary if is_binary(request.headers) else read_list)
    receipts = await _store_groups(request, groups)
    buffered = [receipt.buffer_size for receipt in receipts if receipt.buffer_size is not None]
    response = schemas.ReceivedList(
        status="received",
        groups_processed=len(receipts),
        buffered=len(buffered) or None,
        last_buffer_size=buffered[-1] if buffered else None,
        duplicates=sum(bool(receipt.duplicate) for receipt in receipts) or None,
    )
    return json_response(response.model_dump(exclude_none=True))


@_routes.post("/register")
async def register(registration: schemas.Registration, service: Service) -> dict[str, int]:
    """A trainer announces a run, or takes it over: the configuration is replaced, queue and environments stay.

    `uuid` is the trainer's number, of 128 bits.
    """
    return {"uuid": await service.register(registration)}


@_routes.get("/batch", response_model=schemas.NextBatch)
async def batch(
    request: Request,
    service: Service,
    lease_s: Annotated[
        float | None,
        Query(gt=0, le=7 * 86400, description="Seconds until it is delivered again unless acknowledged."),
    ] = None,
) -> Response:
    """The next batch: whole groups, first in first out, exactly `batch_size` sequences; `{"batch": null}` if none.

    The step advances by one. A batch whose response breaks off is delivered again. The first call tells
    environments that the trainer is ready.
    """
    return await BatchResponse.of_next(service.batches, request, lease_s)


@_routes.post("/batch/ack")
async def acknowledge(
    batch_id: Annotated[str, Body(embed=True, description="`batch_id` of the answer to GET /batch?lease_s=...")],
    service: Service,
) -> dict[str, str]:
    """Confirm a leased batch; it will not be delivered again. May be repeated."""
    await service.batches.ack(batch_id)
    return {"status": "success"}


@_routes.post("/register-env", response_model_exclude_none=True)
async def register_env(body: schemas.RegisterEnv, service: Service) -> schemas.EnvRegistered:
    """An environment announces itself; until the trainer has started it is told to wait and to ask again."""
    env = await service.register_env(body)
    registration = service.run.registration
    if env is None or registration is None:
        return schemas.EnvRegistered(status="wait for trainer to start", run_id=None)
    return schemas.EnvRegistered(
        status="success",
        env_id=env.env_id,
        wandb_name=env.real_name,
        checkpoint_dir=registration.checkpoint_dir,
        starting_step=service.run.step,
        checkpoint_interval=registration.save_checkpoint_interval,
        num_steps=registration.num_steps,
        run_id=service.run.run_id,
    )


@_routes.post("/disconnect-env", response_model=dict[str, str])
async def disconnect_env(env_id: Annotated[StrictInt, Body(embed=True, examples=[0])], service: Service) -> Response:
    """An environment has ended: its minimum stops counting; what it sent stays."""
    try:
        await service.disconnect_env(env_id)
    except Refused as error:
        return JSONResponse({"status": "failure", "error": str(error)}, status_code=error.status)
    return JSONResponse({"status": "success"})


@_routes.get("/")
async def root() -> dict[str, str]:
    """Says who answers."""
    return {"message": "AtroposLib API"}


@_routes.get("/wandb_info")
async def wandb_info(service: Service) -> dict[str, str | None]:
    """Where environments log: `group` and `project`; nulls before a trainer registered."""
    run = service.run.registration
    return {"group": run and run.wandb_group, "project": run and run.wandb_project}


@_routes.get("/info")
async def info(service: Service) -> schemas.Info:
    """Return what the trainer takes; -1 before it registered."""
    run = service.run.registration
    return schemas.Info(batch_size=run.batch_size if run else -1, max_token_len=run.max_token_len if run else -1)


@_routes.get("/status")
async def status(service: Service) -> schemas.Status:
    """Return how far the run is, and why no batch is ready."""
    queue = service.queue
    return schemas.Status(
        current_step=service.run.step,
        queue_size=len(queue.pool),
        queue_sequences=queue.pool.sequences,
        buffered_groups=sum(len(buffer) for buffer in queue.buffers.values()),
        leased_batches=len(queue.leased),
        waiting_for=service.waiting_for(),
        storage_full=service.store.why_full(),
    )


@_routes.get("/latest_example", response_model=schemas.ScoredData | schemas.NoExample)
async def latest_example(service: Service) -> Response:
    """The group that entered last; empty lists before there is one."""
    latest = await service.groups.latest()
    if latest is None:
        return JSONResponse({key: None if key in _NULL_WHEN_EMPTY else [] for key in GROUP_KEYS})
    return Response(latest, media_type="application/json")


@_routes.get("/reset_data", response_class=PlainTextResponse)
async def reset_data(service: Service) -> str:
    """Forget the run: queue, environments, registration. Safe to repeat."""
    await service.reset()
    return "Reset successful"


@_routes.get("/health", response_model=dict[str, str])
async def health(service: Service) -> Response:
    """Tell whether the server lives, and whether it can store groups. Needs no token.

    200 with `storage full` while groups are answered 503 for want of room: batches continue, it passes by itself,
    and a restart would not help. 503 with `stuck` when only a restart helps.
    """
    if (reason := service.store.why_stuck()) is not None:
        return JSONResponse({"status": "stuck", "detail": reason}, status_code=503)
    if (reason := service.store.why_full()) is not None:
        return JSONResponse({"status": "storage full", "detail": reason})
    return JSONResponse({"status": "ok"})


@_routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Service) -> Response:
    """Prometheus text format."""
    return Response(generate_latest(service.live.metrics.registry), media_type="text/plain; version=0.0.4")


_NULL_WHEN_EMPTY = ("overrides", "group_overrides", "env_id", "distill_token_ids", "distill_logprobs")


SMALL_BODY_BYTES = 1 << 16
LARGE_BODY_BYTES = 1 << 21
"""From here on a body is read in a thread, which costs more CPU but holds up nobody."""

T = TypeVar("T")


async def _in_turn(request: Request, read: Callable[[bytes], T]) -> T:
    """`read` the body without keeping other requests waiting: one body between two looks at the sockets."""
    body: bytes = request.scope[BODY_KEY]
    if len(body) < SMALL_BODY_BYTES:
        return read(body)
    async with request.app.state.reading:
        if len(body) > LARGE_BODY_BYTES:
            return await asyncio.to_thread(read, body)
        result = read(body)
        await asyncio.sleep(0)
        return result


async def _store_groups(request: Request, groups: list[EncodedGroup]) -> list[schemas.Received]:
    service: TrajectoryService = request.app.state.service
    return await service.groups.add(
        groups, run_id=request.headers.get(RUN_HEADER), connection=request.scope.get(CONNECTION_KEY)
    )


def _asking_env(request: Request) -> int:
    body, query = request.scope[BODY_KEY], request.query_params
    try:
        if body:
            return schemas.EnvIdentifier.model_validate_json(body).env_id
        if "env_id" in query:
            return schemas.EnvIdentifier.model_validate({"env_id": query["env_id"]}).env_id
    except ValidationError as error:
        place = "body" if body else "query"
        raise RequestValidationError([{**e, "loc": (place, *e["loc"])} for e in error.errors()]) from None
    raise Refused(422, 'env_id is missing; send {"env_id": 0} as JSON body or ?env_id=0')


def __getattr__(name: str) -> FastAPI:
    """Build `app` when it is first asked for: `run-api` has one of its own."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    folder = os.environ.get(STATE_DIR_VARIABLE)
    globals()[name] = create_app(Path(folder) if folder else None)
    return globals()[name]
