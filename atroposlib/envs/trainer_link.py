"""The link between an environment and a trainer: registration, status, pace, evaluations and checkpoints by step."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from atroposlib.envs.config import EvalHandlingEnum
from atroposlib.envs.hooks import EnvHooks
from atroposlib.envs.server_handling.server_manager import requests_out
from atroposlib.errors import ConfigError
from atroposlib.rollouts import pacing
from atroposlib.rollouts.evaluation import Evaluation
from atroposlib.rollouts.failures import logged
from atroposlib.rollouts.source import of_hook

if TYPE_CHECKING:
    from atroposlib.api.client import EnvClient, RegisteredEnv

logger = logging.getLogger(__name__)


class TrainerLink:
    """The link of one environment to its trainer. Its state lies on the environment, where authors look."""

    def __init__(self, env: EnvHooks) -> None:
        self._env = env
        self._evaluation: Evaluation | None = None  # of the environment's `eval_runner`
        self._joined: RegisteredEnv | None = None  # what the API said when this environment registered last
        self._api: EnvClient | None = None
        self._steps_of_trainer = False  # total_steps is what the trainer says

    @property
    def api(self) -> "EnvClient":
        """The connection to the trajectory API, made when it is first needed."""
        if self._api is None:
            from atroposlib.api.client import EnvClient

            self._api = EnvClient(self._env.config.rollout_server_url)
        return self._api

    @property
    def derived_batch_size(self) -> int:
        """Sequences of each batch this environment may fill; -1 while the batch size is unknown."""
        size = pacing.derived_batch_size(self._queue_view())
        return -1 if size is None else size

    @property
    def is_evaluating(self) -> bool:
        return self._env.eval_runner is not None and not self._env.eval_runner.done()

    async def register_env(self) -> None:
        """Wait for the trainer, register, and take over its step, checkpoint folder and number of steps.

        Raises:
            ConfigError: neither this environment nor the trainer says how many steps there are.
        """
        env, config = self._env, self._env.config
        registered = await self.api.register(
            {
                "max_token_length": config.max_token_length,
                "desired_name": config.wandb_name or env.label,
                "weight": config.inference_weight,
                "group_size": config.group_size,
                "min_batch_allocation": config.min_batch_allocation,
            }
        )
        env.curr_step = registered.starting_step
        self._join(registered)
        if env.curr_step > 0:
            env.load_checkpoint()

    async def get_server_info(self) -> None:
        """Take over the trainer's batch size and longest sequence.

        Raises:
            ConfigError: a group of this environment would not fit in a batch.
        """
        info, config = await self.api.info(), self._env.config
        if info["batch_size"] != -1:
            config.batch_size = info["batch_size"]
        if info["max_token_len"] != -1:
            self._env.max_token_len = info["max_token_len"]
        if config.batch_size != -1 and config.group_size > config.batch_size:
            raise ConfigError(
                f"env.group_size is {config.group_size} but the trainer's batch_size is {config.batch_size}; "
                "a group must fit in one batch. Lower --env.group_size or raise batch_size in the trainer"
            )

    async def get_status(self, get_server_info: Callable[[], Awaitable[None]]) -> None:
        """Ask where trainer and queue are; use this environment's share of the inference slots.

        Args:
            get_server_info: asked where the API was reset; the environment's own may do more than the one here.
        """
        env = self._env
        previous_weight = env.status_dict.get("env_weight")
        env.status_dict = await self.api.status_env()
        registered = self.api.registered
        if registered is not None and registered is not self._joined:  # the API was reset, maybe by another trainer
            self._join(registered)
            await get_server_info()
        weight = env.status_dict["env_weight"]
        if weight != previous_weight:
            await env.server.update_weight(weight)
        env.max_num_workers = self.worker_count()

    async def env_step_checks(self) -> None:
        """When the trainer made a step: evaluate, save a checkpoint, log, as often as the settings say."""
        env, step = self._env, self._env.status_dict["current_step"]
        if step == env.curr_step:
            return
        before, env.curr_step = env.curr_step, step
        if pacing.crossed(before, step, env.config.steps_per_eval):
            self._start_evaluation()
        if pacing.crossed(before, step, env.checkpoint_interval):
            with logged("checkpoint not saved"):
                env.save_checkpoint(step // env.checkpoint_interval * env.checkpoint_interval)
        if env.items_sent_this_step >= env.config.min_items_sent_before_logging:
            with logged("metrics not logged"):
                await env.wandb_log({})
            env.items_sent_this_step = 0

    async def add_train_workers(self) -> None:
        """Let as many rollouts run as trainer, queue and a running evaluation allow."""
        env = self._env
        assert env.current_run is not None
        workers = self._limit_during_eval() if self.is_evaluating else env.max_num_workers
        rooms = [pacing.queue_room(self._queue_view())]
        if env.config.total_groups is None:
            rooms.append(pacing.groups_until_finished(**self._step_facts()))
        room = min((room for room in rooms if room is not None), default=None)
        env.workers_added_list.append(max(0, min(workers, workers if room is None else room) - len(env.workers)))
        env.current_run.pool.pace(workers, room)

    def is_served(self) -> bool:
        """True once the trainer has, or will have from the queue, all it wants from this environment."""
        return self._env.config.total_groups is None and pacing.groups_until_finished(**self._step_facts()) == 0

    def worker_count(self) -> int:
        """Groups that may be rolled out at once, before the trainer's pace is looked at."""
        run = self._env.current_run
        return run.concurrency.limit if run is not None and run.concurrency is not None else self.first_worker_count()

    def first_worker_count(self) -> int:
        """The same before anything is known of the engine: the setting, or this many for each server."""
        config = self._env.config
        if config.max_num_workers != "auto" and config.max_num_workers > 0:
            return config.max_num_workers
        return config.max_num_workers_per_node * max(1, len(self._env.server.servers))

    def evaluating(self) -> str | None:
        """Return how far the evaluation is that runs now; None: none does."""
        return self._evaluation.line() if self._evaluation and self.is_evaluating else None

    def held_back(self) -> str | None:
        """Why no rollout may start now by the trainer's or an evaluation's doing; None: one may."""
        if self.is_evaluating and self._limit_during_eval() == 0:
            return f"the end of an evaluation: no rollout starts meanwhile (env.eval_handling); {self.evaluating()}"
        view = self._queue_view()
        step = self._env.status_dict["current_step"]
        if view.batch_size is not None and pacing.queue_room(view) == 0:
            return (
                f"the trainer: {view.queue_groups} groups of {view.group_size} wait for it in the trajectory API, as "
                f"many as {view.max_batches_offpolicy} batches of {view.batch_size} ahead allow "
                f"(env.max_batches_offpolicy), and it is at step {step}; if that does not change, look at the "
                "trainer's log"
            )
        return None

    def not_taken(self) -> str | None:
        """Why the trajectory API does not take groups now; None: it does."""
        reason = self.api.not_taken
        url = self._env.config.rollout_server_url
        return (
            f"the trajectory API {url}: it takes no groups now ({reason}); they are kept and sent when it does"
            if reason
            else None
        )

    def _limit_during_eval(self) -> int:
        config = self._env.config
        return pacing.limit_during_eval(
            self._env.max_num_workers,
            stop_train=config.eval_handling is EvalHandlingEnum.STOP_TRAIN,
            limit_ratio=config.eval_limit_ratio if config.eval_handling is EvalHandlingEnum.LIMIT_TRAIN else None,
        )

    def _join(self, registered: "RegisteredEnv") -> None:
        self._joined = registered
        env, config = self._env, self._env.config
        env.env_id, env.wandb_prepend = registered.env_id, registered.wandb_name
        env.curr_step = min(env.curr_step, registered.starting_step)  # steps made meanwhile are still to be seen
        # trainers without checkpoints register an empty folder, which means none
        env.checkpoint_dir, env.checkpoint_interval = registered.checkpoint_dir, registered.checkpoint_interval
        self._steps_of_trainer |= config.total_steps == -1 and config.total_groups is None
        if self._steps_of_trainer:
            if registered.num_steps == -1:
                raise ConfigError(
                    "env.total_steps is -1 (as many as the trainer says), but the trainer says -1, too; set one of them"
                )
            config.total_steps = registered.num_steps
        logger.info("registered: env_id=%d name=%s step=%d", env.env_id, env.wandb_prepend, env.curr_step)

    def _start_evaluation(self) -> None:
        env = self._env
        if self.is_evaluating:
            logger.warning("evaluation skipped at step %d: the previous one still runs", env.curr_step)
            return
        self._evaluation = Evaluation(
            None, env.label, step=env.curr_step, requests_out=lambda: requests_out(env.server.servers)
        )
        env.eval_runner = asyncio.create_task(self._evaluation.counted(of_hook(env.evaluate(), "evaluate")))
        env.eval_runner.add_done_callback(_log_failure)

    def _queue_view(self) -> pacing.QueueView:
        status, config = self._env.status_dict, self._env.config
        return pacing.QueueView(
            group_size=config.group_size,
            batch_size=None if config.batch_size == -1 else config.batch_size,
            queue_groups=status.get("queue_size", 0),
            own_queue_groups=status.get("self_queue_size", 0),
            max_group_size=status.get("max_group_size", 1),
            unallocated_fraction=status.get("unallocated_fraction", 1.0),
            min_batch_allocation=config.min_batch_allocation,
            max_batches_offpolicy=config.max_batches_offpolicy,
        )

    def _step_facts(self) -> dict[str, int]:
        status, config = self._env.status_dict, self._env.config
        return {
            "current_step": status["current_step"],
            "queue_groups": status["queue_size"],
            "group_size": config.group_size,
            "batch_size": config.batch_size if config.batch_size > 0 else sys.maxsize,
            "total_steps": config.total_steps,
        }


def _log_failure(task: asyncio.Task[object]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("evaluation failed", exc_info=error)
