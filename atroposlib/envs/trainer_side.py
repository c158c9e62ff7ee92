"""The half of `BaseEnv` that follows a trainer: registration, status, pace, evaluations and checkpoints by step."""

import asyncio
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from atroposlib.envs.config import EvalHandlingEnum
from atroposlib.envs.server_handling.server_manager import missing_engine, requests_out
from atroposlib.envs.wandb_side import WandbSide
from atroposlib.errors import ConfigError
from atroposlib.rollouts import pacing
from atroposlib.rollouts.evaluation import Evaluation
from atroposlib.rollouts.run import Run

if TYPE_CHECKING:
    from atroposlib.api.client import EnvClient, RegisteredEnv

logger = logging.getLogger(__name__)


class TrainerSide(WandbSide):
    """Methods the serve mode calls; each may be overridden on its own."""

    workers: set[asyncio.Task[None]]
    status_dict: dict[str, Any]
    max_num_workers: int
    env_id: int = 0
    checkpoint_dir: str = ""
    checkpoint_interval: int = -1
    eval_runner: asyncio.Task[Any] | None = None
    evaluation: Evaluation | None = None  # of the runner
    _api: "EnvClient | None" = None
    _joined: "RegisteredEnv | None" = None  # what the API said when this environment registered last
    _steps_of_trainer = False  # total_steps is what the trainer says
    _run: Run | None = None

    @property
    def api(self) -> "EnvClient":
        """The connection to the trajectory API, made when it is first needed."""
        if self._api is None:
            from atroposlib.api.client import EnvClient

            self._api = EnvClient(self.config.rollout_server_url)
        return self._api

    @property
    def derived_batch_size(self) -> int:
        """Sequences of each batch this environment may fill; -1 while the batch size is unknown."""
        size = pacing.derived_batch_size(self._queue_view())
        return -1 if size is None else size

    async def register_env(self) -> None:
        """Wait for the trainer, register, and take over its step, checkpoint folder and number of steps.

        Raises:
            ValueError: neither this environment nor the trainer says how many steps there are.
        """
        registered = await self.api.register(
            {
                "max_token_length": self.config.max_token_length,
                "desired_name": self.config.wandb_name or self.label,
                "weight": self.config.inference_weight,
                "group_size": self.config.group_size,
                "min_batch_allocation": self.config.min_batch_allocation,
            }
        )
        self.curr_step = registered.starting_step
        self._join(registered)
        if self.curr_step > 0:
            self.load_checkpoint()

    async def get_server_info(self) -> None:
        """Take over the trainer's batch size and longest sequence.

        Raises:
            ValueError: a group of this environment would not fit in a batch.
        """
        info = await self.api.info()
        if info["batch_size"] != -1:
            self.config.batch_size = info["batch_size"]
        if info["max_token_len"] != -1:
            self.max_token_len = info["max_token_len"]
        if self.config.batch_size != -1 and self.config.group_size > self.config.batch_size:
            raise ConfigError(
                f"env.group_size is {self.config.group_size} but the trainer's batch_size is {self.config.batch_size}; "
                "a group must fit in one batch. Lower --env.group_size or raise batch_size in the trainer"
            )

    async def get_status(self) -> None:
        """Ask where trainer and queue are; use this environment's share of the inference slots."""
        previous_weight = self.status_dict.get("env_weight")
        self.status_dict = await self.api.status_env()
        registered = self.api.registered
        if registered is not None and registered is not self._joined:  # the API was reset, maybe by another trainer
            self._join(registered)
            await self.get_server_info()
        weight = self.status_dict["env_weight"]
        if weight != previous_weight:
            await self.server.update_weight(weight)
        self.max_num_workers = self.worker_count()

    async def env_step_checks(self) -> None:
        """When the trainer made a step: evaluate, save a checkpoint, log, as often as the settings say."""
        step = self.status_dict["current_step"]
        if step == self.curr_step:
            return
        before, self.curr_step = self.curr_step, step
        if pacing.crossed(before, step, self.config.steps_per_eval):
            self._start_evaluation()
        if pacing.crossed(before, step, self.checkpoint_interval):
            with logged("checkpoint not saved"):
                self.save_checkpoint(step // self.checkpoint_interval * self.checkpoint_interval)
        if self.items_sent_this_step >= self.config.min_items_sent_before_logging:
            await self.log_now()
            self.items_sent_this_step = 0

    async def log_now(self) -> None:
        """Call `wandb_log`; a failure there is reported and costs only that report."""
        with logged("metrics not logged"):
            await self.wandb_log({})

    async def add_train_workers(self) -> None:
        """Let as many rollouts run as trainer, queue and a running evaluation allow."""
        assert self._run is not None
        workers = self.max_num_workers
        if self.eval_runner is not None and not self.eval_runner.done():
            workers = self._limit_during_eval()
        rooms = [pacing.queue_room(self._queue_view())]
        if self.config.total_groups is None:
            rooms.append(pacing.groups_until_finished(**self._step_facts()))
        room = min((room for room in rooms if room is not None), default=None)
        self.workers_added_list.append(max(0, min(workers, workers if room is None else room) - len(self.workers)))
        self._run.pool.pace(workers, room)

    def _limit_during_eval(self) -> int:
        return pacing.limit_during_eval(
            self.max_num_workers,
            stop_train=self.config.eval_handling is EvalHandlingEnum.STOP_TRAIN,
            limit_ratio=self.config.eval_limit_ratio
            if self.config.eval_handling is EvalHandlingEnum.LIMIT_TRAIN
            else None,
        )

    def is_served(self) -> bool:
        """Whether the trainer has, or will have from the queue, all it wants from this environment."""
        return self.config.total_groups is None and pacing.is_finished(**self._step_facts())

    async def disconnect(self) -> None:
        """Tell the API that this environment sends nothing more."""
        await self.api.disconnect()

    def worker_count(self) -> int:
        """Groups that may be rolled out at once, before the trainer's pace is looked at."""
        if self._run is not None and self._run.concurrency is not None:
            return self._run.concurrency.limit
        return self.first_worker_count()

    def first_worker_count(self) -> int:
        """The same before anything is known of the engine: the setting, or this many for each server."""
        workers = self.config.max_num_workers
        if workers != "auto" and workers > 0:
            return workers
        return self.config.max_num_workers_per_node * max(1, len(self.server.servers))

    def engine_down(self) -> str | None:
        """What is missing while no inference server is up and takes requests, else None."""
        return missing_engine(self.server.servers)

    def outage_timeout_s(self) -> float:
        """Seconds for which a run waits while `engine_down` says something."""
        configs = [getattr(server, "config", None) for server in self.server.servers]  # an author's own may have none
        return max((getattr(config, "outage_timeout_s", math.inf) for config in configs), default=math.inf)

    def evaluating(self) -> str | None:
        """How far the evaluation is that runs now; None: none does."""
        is_running = self.eval_runner is not None and not self.eval_runner.done()
        return self.evaluation.line() if self.evaluation and is_running else None

    def held_back(self) -> str | None:
        """Why no rollout may start now by the trainer's or an evaluation's doing; None: one may."""
        if self.eval_runner is not None and not self.eval_runner.done() and self._limit_during_eval() == 0:
            return f"the end of an evaluation: no rollout starts meanwhile (env.eval_handling); {self.evaluating()}"
        view = self._queue_view()
        step = self.status_dict["current_step"]
        if view.batch_size is not None and pacing.queue_room(view) == 0:
            return (
                f"the trainer: {view.queue_groups} groups of {view.group_size} wait for it in the trajectory API, as "
                f"many as {view.max_batches_offpolicy} batches of {view.batch_size} ahead allow "
                f"(env.max_batches_offpolicy), and it is at step {step}; if that does not change, look at the "
                "trainer's log"
            )
        return None

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        raise NotImplementedError

    def load_checkpoint(self) -> None:
        raise NotImplementedError

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _join(self, registered: "RegisteredEnv") -> None:
        self._joined = registered
        self.env_id, self.wandb_prepend = registered.env_id, registered.wandb_name
        self.curr_step = min(self.curr_step, registered.starting_step)  # steps made meanwhile are still to be seen
        # trainers without checkpoints register an empty folder, which means none
        self.checkpoint_dir, self.checkpoint_interval = registered.checkpoint_dir, registered.checkpoint_interval
        self._steps_of_trainer |= self.config.total_steps == -1 and self.config.total_groups is None
        if self._steps_of_trainer:
            if registered.num_steps == -1:
                raise ConfigError(
                    "env.total_steps is -1 (as many as the trainer says), but the trainer says -1, too; set one of them"
                )
            self.config.total_steps = registered.num_steps
        logger.info("registered: env_id=%d name=%s step=%d", self.env_id, self.wandb_prepend, self.curr_step)

    def _start_evaluation(self) -> None:
        if self.eval_runner is not None and not self.eval_runner.done():
            logger.warning("evaluation skipped at step %d: the previous one still runs", self.curr_step)
            return
        self.evaluation = Evaluation(self.label, requests_out=lambda: requests_out(self.server.servers))
        self.eval_runner = asyncio.create_task(self.evaluation.counted(self.evaluate()))
        self.eval_runner.add_done_callback(_log_failure)

    def _queue_view(self) -> pacing.QueueView:
        status, batch_size = self.status_dict, self.config.batch_size
        return pacing.QueueView(
            group_size=self.config.group_size,
            batch_size=None if batch_size == -1 else batch_size,
            queue_groups=status.get("queue_size", 0),
            own_queue_groups=status.get("self_queue_size", 0),
            max_group_size=status.get("max_group_size", 1),
            unallocated_fraction=status.get("unallocated_fraction", 1.0),
            min_batch_allocation=self.config.min_batch_allocation,
            max_batches_offpolicy=self.config.max_batches_offpolicy,
        )

    def _step_facts(self) -> dict[str, int]:
        steps = self.config.total_steps
        return {
            "current_step": self.status_dict["current_step"],
            "queue_groups": self.status_dict["queue_size"],
            "group_size": self.config.group_size,
            "batch_size": self.config.batch_size if self.config.batch_size > 0 else sys.maxsize,
            "total_steps": steps,
        }


@contextmanager
def logged(what: str) -> Iterator[None]:
    """An author's hook next to the rollouts: its failure must not end a run of days."""
    try:
        yield
    except Exception:
        logger.exception("%s", what)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("evaluation failed", exc_info=error)
