"""`BaseEnv`: what authors subclass. It offers the hooks and the three modes; the work is done in `atroposlib.rollouts`.

An author writes `setup`, `get_next_item` (or `get_item`), `collect_trajectories` and, for a trainer, `evaluate`.
"""

import asyncio
import atexit
import gc
import logging
import sys
from collections.abc import Awaitable, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from atroposlib.envs import hooks
from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.hooks import EnvHooks, ServerConfigs, Trajectories
from atroposlib.envs.item_rollout import ItemRollout
from atroposlib.envs.server_handling.one_by_one import OneByOne
from atroposlib.envs.server_handling.server_baseline import (
    APIServer,
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
)
from atroposlib.envs.server_handling.server_manager import (
    ServerManager,
    ServerManagerConfig,
    missing_engine,
    outage_timeout_s,
)
from atroposlib.envs.trainer_link import TrainerLink
from atroposlib.paths import expand_path
from atroposlib.rollouts.failures import logged
from atroposlib.rollouts.modes import run_process, run_serve
from atroposlib.rollouts.run import Run, RunOutcome
from atroposlib.type_definitions import (
    UUID,
    Item,
    JsonObject,
    Message,
    ScoredDataGroup,
    ScoredDataItem,
)

if TYPE_CHECKING:
    import wandb

    from atroposlib.envs.cli import EnvCommand, Mode, Settings

__all__ = [
    "UUID",
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandlingEnum",
    "Item",
    "Message",
    "OpenaiConfig",
    "ReasoningConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "generate_html",
    "wandb",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")


def __getattr__(name: str) -> ModuleType:
    """`wandb` is imported when it is first used; importing it takes longer than everything else here."""
    if name != "wandb":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import wandb

    globals()["wandb"] = wandb
    return wandb


def _command(env_cls: "type[BaseEnv]", mode: "Mode") -> "type[EnvCommand]":
    from atroposlib.envs.cli import make_command

    return make_command(env_cls, mode)


def generate_html(input_path: str, output_path: str | None = None) -> Path:
    """Write the HTML page of a rollout file; see `atroposlib.frontend.jsonl2html`."""
    from atroposlib.frontend import jsonl2html

    return jsonl2html.generate_html(input_path, output_path)


class BaseEnv(EnvHooks):
    """One environment: items in, scored groups out.

    Hooks: `config_init`, `setup`, `get_next_item` / `get_item`, `item_task`, `collect_trajectory` or
    `collect_trajectories`, `postprocess_histories`, `evaluate`, `wandb_log`, `cleanup`, `teardown`. Every hook
    may raise: the rollout counts as failed, the others continue.
    """

    server_cls: ClassVar[type[APIServer]] = APIServer
    _trainer_link: TrainerLink | None = None

    def __init__(
        self, config: BaseEnvConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        """
        Args:
            config: an instance of `env_config_cls`.
            server_configs: the inference servers; a `ServerBaseline` means that they are discovered.
            slurm: find the servers on the nodes of this SLURM job.
            testing: use scripted servers.
        """
        super().__init__()
        self.config = config
        self.server = ServerManager(
            server_configs,
            slurm=slurm,
            testing=testing,
            server_class=self.server_cls,
            reasoning_config=ReasoningConfig.from_env_config(config),
        )
        self.server_configs = [server.config for server in self.server.servers]
        self.tokenizer = self.load_tokenizer()
        self.server.adopt_tokenizer(self.tokenizer)
        self.max_num_workers = self.trainer_link.worker_count()

    @property
    def trainer_link(self) -> TrainerLink:
        """The trainer as this environment talks to it. Made late: authors' tests skip `__init__`."""
        if self._trainer_link is None:
            self._trainer_link = TrainerLink(self)
        return self._trainer_link

    @cached_property
    def _item_rollout(self) -> ItemRollout:
        return ItemRollout(self)

    # -- hooks of an author ----------------------------------------------------------------------------------------

    async def collect_trajectories(self, item: Item) -> tuple[Trajectories, list[Item]]:
        """Roll out and score one group; with it, more items to roll out. Default: `group_size` rollouts in parallel.

        A rollout that gives nothing or fails is left out, and the group says its size. One that the engine failed or
        killed is tried once more: when weights are updated, the short ones would be all that is left of a group.

        Raises:
            ValueError: no call of `collect_trajectory` gave a scored rollout; or what the first raised.
        """
        return await self._item_rollout.collect_group(item)

    async def evaluate_log(
        self,
        metrics: Mapping[str, float],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: JsonObject | None = None,
        samples: list[JsonObject] | None = None,
        verbose: bool = True,
    ) -> None:
        """Write `metrics.json` (and `samples.jsonl`) of one evaluation to `data_dir_to_save_evals`."""
        from atroposlib.envs.eval import evaluate_log

        folder, servers = self.config.data_dir_to_save_evals, self.server.servers
        await asyncio.to_thread(
            evaluate_log,
            metrics,
            eval_dir=str(expand_path(folder, what="env.data_dir_to_save_evals")) if folder is not None else None,
            task_name=task_name or f"{self.name or type(self).__name__}_eval",
            model_name=model_name or (servers[0].config.model_name if servers else None),
            start_time=start_time,
            end_time=end_time,
            generation_parameters={"max_new_tokens": self.config.max_token_length, **(generation_parameters or {})},
            samples=samples,
            verbose=verbose,
        )

    @classmethod
    def from_settings(cls, settings: "Settings") -> Self:
        """Optional: make the environment from the resolved settings of a command."""
        env = cls(settings.env, settings.servers, settings.manager.slurm, settings.manager.testing)
        env.use_manager_settings(settings)
        return env

    def use_manager_settings(self, settings: "Settings") -> None:
        """Apply the settings of all servers together; for whoever overrides `from_settings`."""
        self.server.max_n_completions = settings.manager.max_n_completions
        if settings.manager.proxy_url:
            self.server.proxy_url, self.server.use_proxy = settings.manager.proxy_url, True

    # -- the three modes -------------------------------------------------------------------------------------------

    @classmethod
    def cli(cls) -> None:
        """The command line of this environment: serve, process and evaluate."""
        from atroposlib.envs.cli import main

        atexit.register(gc.freeze)  # else the interpreter walks a million objects twice before it ends
        sys.exit(main(cls))

    @classmethod
    def get_cli_serve_config_cls(cls) -> "type[EnvCommand]":
        """The serve command: a class made from the command line, with a `run()` method."""
        return _command(cls, "serve")

    @classmethod
    def get_cli_process_config_cls(cls) -> "type[EnvCommand]":
        """The process command: a class made from the command line, with a `run()` method."""
        return _command(cls, "process")

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> "type[EnvCommand]":
        """The evaluate command: a class made from the command line, with a `run()` method."""
        return _command(cls, "evaluate")

    async def env_manager(self) -> RunOutcome:
        """Serve a trainer until it has what it wants; see `atroposlib.rollouts.modes`."""
        return await self._torn_down(run_serve(self))

    async def process_manager(self) -> RunOutcome:
        """Write `total_steps` groups to files; see `atroposlib.rollouts.modes`."""
        self.process_mode = True
        self.n_groups_to_process = self.config.total_steps
        self.group_size_to_process = self.config.group_size
        return await self._torn_down(run_process(self))

    async def _run_evaluate(self) -> int:
        from atroposlib.envs.eval import run_evaluate

        return await self._torn_down(run_evaluate(self, self.check_engines))

    async def _torn_down(self, mode: Awaitable[T]) -> T:
        """`mode` to its end, then `teardown`, whose failure takes nothing away from what was done."""
        try:
            return await mode
        finally:
            with logged("teardown failed"):
                await self.teardown()

    # -- one rollout -----------------------------------------------------------------------------------------------

    async def handle_env(self, item_uuid: UUID) -> Trajectories:
        """Roll out, check, store and send the running item `item_uuid`; raises what its hooks raise."""
        return await self._item_rollout.handle(item_uuid, self.collect_trajectories, self.handle_send_to_api)

    async def handle_send_to_api(
        self,
        scored_data: Trajectories,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> int:
        """Check the groups of one item, store the usable ones, send them; how many were stored.

        Groups of the wrong size or (by `ensure_scores_are_not_same`) with equal scores are dropped. Groups with a
        sequence too long for the trainer are stored but not sent.

        Raises:
            GroupError: a group no one could use (shapes, ids that are no integers, numbers that are not finite).
        """
        return await self._item_rollout.submit(
            scored_data, item, send=do_send_to_api, abort_when_too_long=abort_on_any_max_length_exceeded
        )

    # -- a trainer: see `TrainerLink` ------------------------------------------------------------------------------

    @property
    def derived_batch_size(self) -> int:
        """Sequences of each batch this environment may fill; -1 while the batch size is unknown."""
        return self.trainer_link.derived_batch_size

    async def register_env(self) -> None:
        await self.trainer_link.register_env()

    async def get_server_info(self) -> None:
        await self.trainer_link.get_server_info()

    async def get_status(self) -> None:
        await self.trainer_link.get_status(self.get_server_info)

    async def env_step_checks(self) -> None:
        await self.trainer_link.env_step_checks()

    async def add_train_workers(self) -> None:
        await self.trainer_link.add_train_workers()

    async def setup_wandb(self) -> None:
        """Start the wandb run: in the trainer's project when serving, once the trainer named it."""
        if not self.config.use_wandb:
            return
        while not self.process_mode and self.wandb_project is None:
            info = await self.trainer_link.api.wandb_info()
            self.wandb_group, self.wandb_project = info["group"], info["project"]
            if self.wandb_project is None:  # no trainer yet; one that names no project says ""
                await asyncio.sleep(hooks.PROJECT_POLL_S)
        await hooks.start_wandb(
            self.wandb_module,
            name=hooks.run_name(self.config.wandb_name or self.label),
            project=self.wandb_project or None,
            group=self.wandb_group or None,
            config=self.config.model_dump(mode="json"),
        )

    # -- what the runtime asks ---------------------------------------------------------------------------------------

    async def check_engines(self) -> bool:
        """Raise ConfigError when the tokenizer is not the engines'; False when one did not answer: ask again."""
        if not isinstance(self.server, ServerManager):  # an author's own
            return True
        return await self.server.check_tokenizer(self.tokenizer, self.config.tokenizer_name)

    def engine_down(self) -> str | None:
        """Return what is missing while no inference server is up and takes requests, else None."""
        return missing_engine(self.server.servers)

    def outage_timeout_s(self) -> float:
        """Seconds for which a run waits while `engine_down` says something."""
        return outage_timeout_s(self.server.servers)

    def attach(self, run: Run) -> None:
        """Use this run's sink and journal from now on."""
        self.current_run = run
        if run.journal is not None:
            self.server.keep_responses(OneByOne.of_run(run.journal, self.config))

    def write_html(self, rollouts: str, output: str) -> None:
        generate_html(rollouts, output)
