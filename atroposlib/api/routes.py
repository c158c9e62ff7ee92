"""The documented HTTP routes besides the hot ones: trainers, environments, and what people look at."""

from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from atroposlib.api import schemas
from atroposlib.api.answers import refuse
from atroposlib.api.batch_response import BatchResponse
from atroposlib.api.payload import GROUP_KEYS
from atroposlib.api.refusal import Refused
from atroposlib.api.service import TrajectoryService


async def _service(request: Request) -> TrajectoryService:
    return request.app.state.service


Service = Annotated[TrajectoryService, Depends(_service)]


def add_routes(api: FastAPI) -> None:
    """All routes but those of `hot_routes.py`."""
    _add_trainer_routes(api)
    _add_env_routes(api)
    _add_common_routes(api)


def _add_trainer_routes(api: FastAPI) -> None:
    @api.post("/register", response_model=schemas.Uuid)
    async def register(registration: schemas.Registration, service: Service) -> dict[str, int]:
        """A trainer announces a run, or takes it over: the configuration is replaced, queue and environments stay."""
        return {"uuid": await service.register(registration)}

    @api.get(
        "/batch",
        response_model=schemas.BatchAnswer,
        responses={
            503: {"model": schemas.BatchAnswer, "description": "Groups cannot be read now; they stay queued."},
        },
    )
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
        return await BatchResponse.of_next(service, request, lease_s)

    @api.post("/batch/ack", response_model=schemas.Outcome, response_model_exclude_none=True)
    async def acknowledge(body: schemas.BatchAck, service: Service) -> dict[str, str]:
        """Confirm a leased batch; it will not be delivered again. May be repeated."""
        await service.batches.ack(body.batch_id)
        return {"status": "success"}


def _add_env_routes(api: FastAPI) -> None:
    @api.post("/register-env", response_model=schemas.EnvRegistered, response_model_exclude_none=True)
    async def register_env(body: schemas.RegisterEnv, service: Service) -> dict[str, Any]:
        """An environment announces itself; until the trainer has started it is told to wait and to ask again."""
        env = await service.register_env(body)
        registration = service.run.registration
        if env is None or registration is None:
            return {"status": "wait for trainer to start"}
        return {
            "status": "success",
            "env_id": env.env_id,
            "wandb_name": env.real_name,
            "checkpoint_dir": registration.checkpoint_dir,
            "starting_step": service.run.step,
            "checkpoint_interval": registration.save_checkpoint_interval,
            "num_steps": registration.num_steps,
            "run_id": service.run.run_id,
        }

    @api.post(
        "/disconnect-env",
        response_model=schemas.Outcome,
        response_model_exclude_none=True,
        responses={404: {"model": schemas.Outcome}},
    )
    async def disconnect_env(
        body: Annotated[dict[str, Any], Body(examples=[{"env_id": 0}])], service: Service
    ) -> Response:
        """An environment has ended: its minimum stops counting; what it sent stays."""
        env_id = body.get("env_id")
        if not isinstance(env_id, int) or isinstance(env_id, bool):
            return refuse(422, f"env_id is {env_id!r}; expected an integer")
        try:
            await service.disconnect_env(env_id)
        except Refused as error:
            return JSONResponse({"status": "failure", "error": str(error)}, status_code=error.status)
        return JSONResponse({"status": "success"})


def _add_common_routes(api: FastAPI) -> None:
    @api.get("/", response_model=schemas.Message)
    async def root() -> dict[str, str]:
        """Says who answers."""
        return {"message": "AtroposLib API"}

    @api.get("/wandb_info", response_model=schemas.WandbInfo)
    async def wandb_info(service: Service) -> dict[str, str | None]:
        """Where environments log; nulls before a trainer registered."""
        run = service.run.registration
        return {"group": run and run.wandb_group, "project": run and run.wandb_project}

    @api.get("/info", response_model=schemas.Info)
    async def info(service: Service) -> dict[str, int]:
        """What the trainer takes; -1 before it registered."""
        run = service.run.registration
        return {"batch_size": run.batch_size if run else -1, "max_token_len": run.max_token_len if run else -1}

    @api.get("/status", response_model=schemas.Status)
    async def status(service: Service) -> dict[str, Any]:
        """How far the run is, and why no batch is ready."""
        queue = service.queue
        return {
            "current_step": service.run.step,
            "queue_size": len(queue.pool),
            "queue_sequences": queue.pool.sequences,
            "buffered_groups": sum(len(buffer) for buffer in queue.buffers.values()),
            "leased_batches": len(queue.leased),
            "waiting_for": service.waiting_for(),
        }

    @api.get("/latest_example", response_model=schemas.ScoredData)
    async def latest_example(service: Service) -> Response:
        """The group that entered last; empty lists before there is one."""
        latest = await service.groups.latest()
        if latest is None:
            return JSONResponse({key: None if key in _NULL_WHEN_EMPTY else [] for key in GROUP_KEYS})
        return Response(latest, media_type="application/json")

    @api.get("/reset_data", response_class=PlainTextResponse)
    async def reset_data(service: Service) -> PlainTextResponse:
        """Forget the run: queue, environments, registration. Safe to repeat."""
        await service.reset()
        return PlainTextResponse("Reset successful")

    @api.get(
        "/health",
        response_model=schemas.Health,
        response_model_exclude_none=True,
        responses={503: {"model": schemas.Health, "description": "Only a restart helps."}},
    )
    async def health(service: Service) -> Response:
        """Whether the server lives, and whether it can store groups. Needs no token.

        200 with `storage full` while groups are answered 503 for want of room: batches go on, it passes by itself,
        and a restart would not help. 503 with `stuck` when only a restart helps.
        """
        if service.store.is_stuck():
            return JSONResponse({"status": "stuck", "detail": "the writing thread has ended"}, status_code=503)
        if (reason := service.store.why_full()) is not None:
            return JSONResponse({"status": "storage full", "detail": reason})
        return JSONResponse({"status": "ok"})

    @api.get("/metrics", response_class=PlainTextResponse)
    async def metrics(service: Service) -> Response:
        """Prometheus text format."""
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4")


_NULL_WHEN_EMPTY = ("overrides", "group_overrides", "env_id", "distill_token_ids", "distill_logprobs")
