"""Batches from the trajectory API, each trained on once.

A batch is leased, and acknowledged only when a checkpoint holds its update. A trainer that dies in between gets it
again; one that comes twice is recognised by its id. What is lost is time, never a batch.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Self, TypeVar

from atroposlib.api.client import Batch, TrainerClient
from atroposlib.errors import ApiError
from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

T = TypeVar("T")
_POLL_S = 0.25
_REMIND_S = 8.0
_REGISTER_DEADLINE_S = 300.0
_ACK_DEADLINE_S = 60.0
_ARRIVING_S = 5.0  # for an answer on its way when the wait ends


class BatchFeed:
    """A blocking view of `TrainerClient` for a loop that computes."""

    def __init__(self, config: TrainingConfig, *, trained: list[str]) -> None:
        """`trained`: ids of batches in the checkpoint that this run starts from."""
        self._config = config
        self._runner = asyncio.Runner()
        self._client = TrainerClient(config.atropos_url)
        self._trained = list(trained)  # in the weights, and not acknowledged yet
        self._saved = set(trained)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    @property
    def unacknowledged(self) -> list[str]:
        """Ids of trained batches that the API still holds; part of a checkpoint."""
        return list(self._trained)

    def register(self, step: int, should_stop: Callable[[], bool]) -> None:
        """Announce the run, or take it over at `step`; not done when `should_stop` says so first.

        Raises:
            ApiError: refused, or no answer within `batch_wait_s` or five minutes.
        """
        deadline_s = min(_REGISTER_DEADLINE_S, self._config.batch_wait_s or math.inf)
        registering = self._client.register(registration(self._config, step), deadline_s=deadline_s)
        if self._runner.run(_unless(should_stop, registering)) is not None:
            self.acknowledge(should_stop)

    def next(self, should_stop: Callable[[], bool]) -> Batch | None:
        """The next batch that is not in the weights yet; None when `should_stop` says so.

        Raises:
            ApiError: none came within `batch_wait_s`; the message says what the API waits for.
        """
        started = next_word = time.monotonic()
        while not should_stop():
            batch = self._runner.run(self._ask(started, should_stop))
            if batch is not None and batch.batch_id not in self._trained:
                return batch
            if batch is not None:
                self._seen_again(batch.batch_id)
                continue
            now = time.monotonic()
            limit = self._config.batch_wait_s
            if limit is not None and now - started > limit:
                raise ApiError(f"no batch for {limit:.0f} s from {self._client.url}; {self._why()}")
            if now - next_word > _REMIND_S:
                logger.warning("waiting for a batch: waited_s=%.0f %s", now - started, self._why())
                next_word = now
            time.sleep(_POLL_S)
        return None

    def note_trained(self, batch: Batch) -> None:
        """The weights now hold this batch's update; the next checkpoint will too."""
        if batch.batch_id is not None:
            self._trained.append(batch.batch_id)

    def saved(self, should_stop: Callable[[], bool]) -> None:
        """A checkpoint with `unacknowledged` is on disk: the API may forget these batches."""
        self._saved = set(self._trained)
        self.acknowledge(should_stop)

    def acknowledge(self, should_stop: Callable[[], bool]) -> None:
        """Tell the API about every saved batch; one it does not know (any more) is done as well.

        An API that does not answer is told after the next checkpoint, or at the next start when `should_stop` says so:
        a batch that is forgotten here and comes again would be trained twice.
        """
        end = time.monotonic() + _ACK_DEADLINE_S
        for batch_id in [batch_id for batch_id in self._trained if batch_id in self._saved]:
            try:
                if not self._runner.run(_unless(should_stop, self._ack(batch_id, max(0.0, end - time.monotonic())))):
                    return
            except ApiError as error:
                logger.warning("batch %s is not acknowledged: %s", batch_id, error)
                if error.status != HTTPStatus.NOT_FOUND:
                    continue
            self._trained.remove(batch_id)

    async def _ack(self, batch_id: str, deadline_s: float) -> bool:
        await self._client.ack(batch_id, deadline_s=deadline_s)
        return True

    async def _ask(self, started: float, should_stop: Callable[[], bool]) -> Batch | None:
        """A batch, or None; a stop or `batch_wait_s` also ends the wait for an API that is away."""
        limit = self._config.batch_wait_s

        def is_over() -> bool:
            return should_stop() or (limit is not None and time.monotonic() - started > limit)

        return await _unless(is_over, self._client.batch(self._config.batch_lease_s, binary=True))

    def _seen_again(self, batch_id: str | None) -> None:
        logger.warning("batch %s came again and is not trained twice; raise batch_lease_s", batch_id)

    def _why(self) -> str:
        try:
            status = self._runner.run(self._client.status(deadline_s=5))
        except ApiError as error:
            return str(error)
        facts = ("waiting_for", "queue_size", "queue_sequences", "current_step")
        return " ".join(f"{key}={status.get(key)!r}" for key in facts)


async def _unless(is_over: Callable[[], bool], request: Coroutine[object, object, T]) -> T | None:
    """Return what the request gives; None when it is over first and no answer was on its way."""
    asked = asyncio.create_task(request)
    while not (await asyncio.wait([asked], timeout=_POLL_S))[0]:
        if is_over():
            if (await asyncio.wait([asked], timeout=_ARRIVING_S))[0]:
                break
            asked.cancel()
            await asyncio.wait([asked])
            return None
    return asked.result()


def registration(config: TrainingConfig, step: int) -> JsonObject:
    """Return the body of `/register`."""
    return {
        "wandb_group": config.wandb_group or "",
        "wandb_project": config.wandb_project or "",
        "batch_size": config.step_sequences,
        "max_token_len": config.seq_len,
        "checkpoint_dir": config.save_path,
        "save_checkpoint_interval": config.checkpoint_interval,
        "starting_step": step,
        "num_steps": config.training_steps,
    }


def staleness(group: Mapping[str, Json], version: int) -> int | None:
    """Weight updates between the group's first generated token and now; None when the group does not tell.

    A rollout over several turns may span updates; the engine names one version per reply, so the oldest is that of
    the first reply.
    """
    first = _first_version(group)
    return version - int(first) if first is not None and first.isdigit() else None


def names_other_weights(group: Mapping[str, Json]) -> bool:
    """True when the engine's name for the weights is none that a push gave, as after an engine was started again."""
    first = _first_version(group)
    return first is not None and not first.isdigit()


def _first_version(group: Mapping[str, Json]) -> str | None:
    params = group.get("generation_params") or {}
    first = params.get("weight_version_start", params.get("weight_version"))
    return None if first is None else str(first)


def generate_times(groups: Sequence[Mapping[str, Json]]) -> dict[str, float]:
    """Return how long the batch's groups were rolled out, scoring included: metrics; empty when no group tells.

    Groups are rolled out side by side and while the trainer computes, so these seconds are no part of a step's.
    """
    seconds = [(group.get("generation_params") or {}).get("duration_s") for group in groups]
    known = [float(value) for value in seconds if value is not None]
    if not known:
        return {}
    return {"time/generate_mean_s": sum(known) / len(known), "time/generate_max_s": max(known)}
