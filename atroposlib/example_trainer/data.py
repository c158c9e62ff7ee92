"""Batches of the trajectory API, each trained on once, and their rows, one per sequence, aligned by token.

A batch is leased, and acknowledged only when a checkpoint holds its update. A trainer that dies in between gets it
again; one that comes twice is recognised by its id. What is lost is time, never a batch.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from atroposlib.api.client import Batch, TrainerClient
from atroposlib.backoff import poll_pause_s
from atroposlib.errors import ApiError, DataError
from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.losses.advantages import Groups, row_advantages
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB, Json, JsonObject

T = TypeVar("T")
_POLL_S = 0.25
_REMIND_S = 8.0
_REGISTER_DEADLINE_S = 300.0
_ACK_DEADLINE_S = 60.0
_ARRIVING_S = 5.0  # for an answer on its way when the wait ends
PAD_TO = 64
"""Upstream's `pad_data_to_good_offset` pads to a multiple of this."""


@dataclass(frozen=True)
class TrainingRow:
    """One sequence of a batch. T tokens, prompt and completion."""

    tokens: np.ndarray  # [T] int64
    trained: np.ndarray  # [T] bool
    infer_logp: np.ndarray | None  # [T] float32 of the engine; 0 where not trained
    score: float
    group: int  # rows with the same number belong together
    temperature: float
    advantages: np.ndarray | None = None  # [T] given by the environment
    zero_advantage: bool = False
    teacher_ids: np.ndarray | None = None  # [T,k] int64 tokens that a teacher named
    teacher_logp: np.ndarray | None = None  # [T,k] float32 its log-probabilities of them; -inf where it named fewer

    @property
    def trained_tokens(self) -> int:
        return int(self.trained.sum())


def rows_of(groups: Sequence[Mapping[str, Json]], *, seq_len: int, temperature: float) -> list[TrainingRow]:
    """The rows of one batch, in order.

    Args:
        groups: as delivered by the API; absent keys may be null.
        seq_len: longest sequence that is taken.
        temperature: of groups that do not tell theirs.

    Raises:
        DataError: a row is too long, or its fields do not fit together.
    """
    rows = []
    for number, group in enumerate(groups):
        for i in range(len(group["tokens"])):
            try:
                rows.append(_row(group, i, number, seq_len, temperature))
            except DataError:
                raise
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
                raise DataError(f"sequence {i} of group {number} has fields that cannot be read: {why}") from error
    return rows


def pad_data_to_good_offset(
    data: Mapping[str, Json], batch_size: int, extract_inference_logprobs: bool = True
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]:
    """Upstream's padding, for trainers written against it.

    Args:
        data: the body of `GET /batch`.
        batch_size: rows per micro-batch; the last one may be smaller.

    Returns:
        Lists of micro-batches: input ids [b,T], labels [b,T] (-100 where no loss), advantages [b,1], temperatures
        [b,1,1], log-probabilities [b,T] (1.0 where masked or absent) or None. T is a multiple of 64.
    """
    rows = rows_of(data["batch"], seq_len=2**31, temperature=1.0)
    width = math.ceil(max(1, max(len(row.tokens) for row in rows) - 1) / PAD_TO) * PAD_TO + 1

    def table(fill: float, values: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        filled = np.full((len(rows), width), fill, dtype=np.float32 if dtype.is_floating_point else np.int64)
        for line, value in zip(filled, values, strict=True):
            line[: len(value)] = value
        return torch.as_tensor(filled, dtype=dtype)

    tokens = table(0, [row.tokens for row in rows], torch.long)[:, :-1]
    labels = table(IGNORE_INDEX, [np.where(row.trained, row.tokens, IGNORE_INDEX) for row in rows], torch.long)[:, 1:]
    scores = torch.tensor([row.score for row in rows], dtype=torch.float64)
    advantages = row_advantages("grpo", scores, Groups.of(torch.tensor([row.group for row in rows])))
    advantages = advantages.masked_fill(torch.tensor([row.zero_advantage for row in rows]), 0.0).float()[:, None]
    temperatures = torch.tensor([row.temperature for row in rows])[:, None, None]
    cut = [slice(start, start + batch_size) for start in range(0, len(rows), batch_size)]
    logprobs = None
    if extract_inference_logprobs and any(row.infer_logp is not None for row in rows):
        given = [
            np.where(r.trained, PROMPT_LOGPROB if r.infer_logp is None else r.infer_logp, PROMPT_LOGPROB) for r in rows
        ]
        logprobs = table(PROMPT_LOGPROB, given, torch.float32)[:, 1:]
    parts = [[whole[part] for part in cut] for whole in (tokens, labels, advantages, temperatures)]
    return parts[0], parts[1], parts[2], parts[3], None if logprobs is None else [logprobs[part] for part in cut]


def _row(group: Mapping[str, Json], i: int, number: int, seq_len: int, temperature: float) -> TrainingRow:
    tokens = np.asarray(group["tokens"][i], dtype=np.int64)
    trained = np.asarray(group["masks"][i], dtype=np.int64) != IGNORE_INDEX
    logprobs, advantages, teacher_ids, teacher_logp = (
        _of_row(group, key, i) for key in ("inference_logprobs", "advantages", "distill_token_ids", "distill_logprobs")
    )
    what = f"sequence {i} of group {number}"
    if len(tokens) > seq_len:
        raise DataError(
            f"{what} has {len(tokens)} tokens, the trainer takes {seq_len}; raise seq_len or lower the environment's "
            "max_token_length"
        )
    per_token = {"masks": trained, "inference_logprobs": logprobs, "advantages": advantages}
    per_token |= {"distill_token_ids": teacher_ids, "distill_logprobs": teacher_logp}
    for name, values in per_token.items():
        if values is not None and len(values) != len(tokens):
            raise DataError(f"{what} has {len(tokens)} tokens but {len(values)} {name}; expected one per token")
    trained[:1] = False  # nothing predicts the first token
    overrides = (group.get("overrides") or [{}] * len(group["tokens"]))[i] or {}
    return TrainingRow(
        tokens=tokens,
        trained=trained,
        infer_logp=None if logprobs is None else np.asarray(logprobs, dtype=np.float32),
        score=float(group["scores"][i]),
        group=number,
        temperature=_temperature(group, overrides, temperature),
        advantages=None if advantages is None else np.asarray(advantages, dtype=np.float32),
        zero_advantage=bool(overrides.get("set_advantage_to_zero")),
        **_teacher_view(teacher_ids, teacher_logp, what),
    )


def _teacher_view(
    ids: Sequence[Sequence[int]] | None, logprobs: Sequence[Sequence[float]] | None, what: str
) -> dict[str, np.ndarray]:
    """Return the teacher's tables [T,k], k being the most tokens that it named at one position; {} without one."""
    if ids is None or logprobs is None:
        return {}
    counts = [len(line) for line in ids]
    if counts != [len(line) for line in logprobs]:
        raise DataError(f"{what} has other numbers of distill_token_ids than of distill_logprobs at some position")
    most = max(1, *counts)
    tables = {
        "teacher_ids": np.zeros((len(counts), most), np.int64),
        "teacher_logp": np.full((len(counts), most), -np.inf, np.float32),
    }
    for table, given in zip(tables.values(), (ids, logprobs), strict=True):
        for position, line in enumerate(given):
            table[position, : len(line)] = line
    return tables


def _of_row(group: Mapping[str, Json], key: str, i: int) -> Json:
    values = group.get(key)
    return None if values is None or len(values) == 0 else values[i]


def _temperature(group: Mapping[str, Json], overrides: Mapping[str, Json], default: float) -> float:
    """The first of: the row's override, generation_params, group_overrides, the default; not above 0 means 1."""
    for source in (overrides, group.get("generation_params") or {}, group.get("group_overrides") or {}):
        if source.get("temperature") is not None:
            return float(source["temperature"]) if float(source["temperature"]) > 0 else 1.0
    return default


logger = logging.getLogger(__name__)


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
                logger.warning("batch %s came again and is not trained twice; raise batch_lease_s", batch.batch_id)
                continue
            now = time.monotonic()
            limit = self._config.batch_wait_s
            if limit is not None and now - started > limit:
                raise ApiError(f"no batch for {limit:.0f} s from {self._client.url}; {self._why()}")
            if now - next_word > _REMIND_S:
                logger.warning("waiting for a batch: waited_s=%.0f %s", now - started, self._why())
                next_word = now
            time.sleep(poll_pause_s(now - started, _POLL_S))
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
