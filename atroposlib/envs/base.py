"""`BaseEnv`: what authors subclass. It offers the hooks and the three modes; the work is done in `atroposlib.rollouts`.

An author writes `setup`, `get_next_item` (or `get_item`), `collect_trajectories` and, for a trainer, `evaluate`.
"""

import asyncio
import atexit
import gc
import json
import logging
import sys
import traceback
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

from pydantic import BaseModel

from atroposlib.api.batching import can_sum
from atroposlib.envs import checkpoints
from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.server_handling.fan_out import contained, raise_first
from atroposlib.envs.server_handling.one_by_one import OneByOne
from atroposlib.envs.server_handling.server_baseline import (
    APIServer,
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
)
from atroposlib.envs.server_handling.server_manager import ServerManager, ServerManagerConfig
from atroposlib.envs.trainer_side import TrainerSide, logged
from atroposlib.errors import ConfigError, EngineFault, KilledFault, PathError
from atroposlib.paths import expand_path
from atroposlib.rollouts import groups as group_checks
from atroposlib.rollouts.earlier import EarlierRollouts
from atroposlib.rollouts.early_stop import EarlyStop, sample_until
from atroposlib.rollouts.failures import NO_GROUP, is_scored
from atroposlib.rollouts.locations import RunFiles
from atroposlib.rollouts.modes import run_process, run_serve
from atroposlib.rollouts.run import Run, RunOutcome
from atroposlib.rollouts.source import current_work
from atroposlib.rollouts.trace import current_trace, row_of_group
from atroposlib.type_definitions import UUID, Item, Message, ScoredDataGroup, ScoredDataItem, UnscoredResponse

if TYPE_CHECKING:
    import wandb

    from atroposlib.envs.cli import Settings

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
ServerConfigs = ServerBaseline | Sequence[APIServerConfig]
Trajectories = ScoredDataGroup | list[ScoredDataGroup | None] | None
Trajectory = tuple[ScoredDataItem, list[Item]]


def __getattr__(name: str) -> ModuleType:
    """`wandb` is imported when it is first used; importing it takes longer than everything else here."""
    if name != "wandb":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import wandb

    globals()["wandb"] = wandb
    return wandb


def generate_html(input_path: str, output_path: str | None = None) -> Path:
    """Write the HTML page of a rollout file; see `atroposlib.frontend.jsonl2html`."""
    from atroposlib.frontend import jsonl2html

    return jsonl2html.generate_html(input_path, output_path)


class BaseEnv(TrainerSide):
    """One environment: items in, scored groups out.

    Hooks: `config_init`, `setup`, `get_next_item` / `get_item`, `item_task`, `collect_trajectory` or
    `collect_trajectories`, `postprocess_histories`, `evaluate`, `wandb_log`, `cleanup`, `teardown`. Every hook
    may raise: the rollout counts as failed, the others continue.
    """

    name: str | None = None
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    server_cls: ClassVar[type[APIServer]] = APIServer

    settings_text: str | None = None  # the resolved settings as YAML, kept next to the rollouts
    fresh = False  # start a new run instead of resuming one
    last_completed_item: Item | None = None
    jsonl_writer = None  # upstream's attribute; rollout files are written by `atroposlib.rollouts.files`

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
        self.odd_rows = group_checks.OddRows()
        self.workers: set[asyncio.Task[None]] = set()
        self.eval_workers: set[asyncio.Task[Any]] = set()
        self.backlog: list[Item] = []
        self.running_items: dict[UUID, dict[str, Any]] = {}
        self.status_dict: dict[str, Any] = {"queue_size": 0, "current_step": 0, "env_weight": 1.0}
        self.rollouts_for_wandb: list[Any] = []
        self.completion_lengths: list[int] = []
        self.task_duration: list[float] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.task_successful: list[int] = []
        self.mainloop_timings: list[float] = []
        self.workers_added_list: list[int] = []
        self.max_num_workers = self.worker_count()

    # -- hooks of an author ----------------------------------------------------------------------------------------

    @classmethod
    def config_cls(cls) -> type[BaseEnvConfig]:
        """Optional: another way to name `env_config_cls`."""
        return cls.env_config_cls

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerConfigs]:
        """Default settings: the environment's and its servers' (one config, a list, or a ServerBaseline)."""
        return cls.config_cls()(), ServerBaseline()

    async def setup(self) -> None:
        """Optional: load data; called once before anything else, in every mode."""

    async def get_next_item(self) -> Item | None:
        """The next item. None: nothing now (`process` ends, `serve` asks again)."""
        if not self.has_get_item:
            raise NotImplementedError(f"{type(self).__name__} must define get_next_item() or get_item(index)")
        self._next_index = getattr(self, "_next_index", -1) + 1
        return await self.get_item(self._next_index)

    async def get_item(self, index: int) -> Item | None:
        """Optional: item number `index`, the same at every call; None from the end on.

        With it a run of N groups covers exactly the first N items (later ones replace those that fail), also over
        restarts.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define get_item(index)")

    def item_task(self, item: Item) -> str:
        """Optional: which task an item belongs to, for counts and for setting broken tasks aside."""
        return self.label

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """Roll out and score one sequence; with it, more items to roll out."""
        raise NotImplementedError(f"{type(self).__name__} must define collect_trajectory or collect_trajectories")

    async def collect_trajectories(self, item: Item) -> tuple[Trajectories, list[Item]]:
        """Roll out and score one group; with it, more items to roll out. Default: `group_size` rollouts in parallel.

        A rollout that gives nothing or fails is left out, and the group says its size. One that the engine failed or
        killed is tried once more: when weights are updated, the short ones would be all that is left of a group.

        Raises:
            ValueError: no call of `collect_trajectory` gave a scored rollout; or what the first raised.
        """
        tried = 0

        async def ask(size: int) -> list[Trajectory | BaseException]:
            nonlocal tried
            first, tried = tried, tried + size
            return await self._trajectories(item, range(first, tried))

        return self._merged(await sample_until(self.early_stop, self.config.group_size, ask, self._is_accepted))

    def _merged(self, rollouts: list[Trajectory | BaseException]) -> tuple[ScoredDataGroup, list[Item]]:
        """The group of rollouts, without those that failed; raises the first fault where all did."""
        scored = [each for each in rollouts if not isinstance(each, BaseException)]
        faults = {index: each for index, each in enumerate(rollouts) if isinstance(each, BaseException)}
        if not scored:
            faults.clear()
            raise_first(rollouts)
        group = self.sized(self.joined([rollout for rollout, _ in scored]))
        if faults:
            size = len(group.get("scores", ()))
            group["group_overrides"] = {**(group.get("group_overrides") or {}), "group_size": size}
            group["unscored"] = [self._unscored(fault, index) for index, fault in faults.items()]
        return group, [more for _, backlog in scored for more in backlog]

    def joined(self, items: Sequence[ScoredDataItem]) -> ScoredDataGroup:
        """Optional: the group of the rollouts of `collect_trajectory`; another way is for rollouts of several rows."""
        return group_checks.merge_items(items)

    async def _trajectories(self, item: Item, rows: Iterable[int]) -> list[Trajectory | BaseException]:
        """Rollouts of these rows at the same time, each or why there is none."""

        async def roll_out(row: int) -> Trajectory:
            with row_of_group(row):
                result = await contained(self.collect_trajectory(item))
            rollout, backlog = result if isinstance(result, tuple) else (result, [])
            if not isinstance(rollout, dict):
                raise ValueError(
                    f"collect_trajectory returned {type(rollout).__name__} for one of {self.config.group_size} "
                    "rollouts; it must return (ScoredDataItem, backlog)"
                )
            return rollout, backlog or []

        results = dict(zip(rows, await asyncio.gather(*map(roll_out, rows), return_exceptions=True), strict=True))
        again = [row for row, result in results.items() if isinstance(result, EngineFault | KilledFault)]
        if again and any(isinstance(result, tuple) for result in results.values()):
            more = await asyncio.gather(*map(roll_out, again), return_exceptions=True)
            results.update(zip(again, more, strict=True))
        return list(results.values())

    def _is_accepted(self, each: Trajectory | BaseException) -> bool:
        if isinstance(each, BaseException):
            return False
        score = each[0].get("scores", 0.0)
        return is_scored(score) and score > self.config.accept_score

    def _unscored(self, fault: BaseException, index: int) -> UnscoredResponse:
        """Count one response that has no score; what is recorded of it."""
        said = group_checks.unscored_response(fault, index)
        logger.warning("response left out: class=%s index=%d error=%s", said["failure"], index, said["error"])
        work = current_work.get()
        if self._run and work:
            self._run.failures.add_response(work, fault, index)
        traceback.clear_frames(fault.__traceback__)  # they hold the rollout, which holds the fault
        return said

    @property
    def early_stop(self) -> EarlyStop:
        """When to stop sampling one item, for `sample_until`."""
        return EarlyStop(self.config.stop_after_accepted, self.config.hopeless_rate)

    def sized(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """The group, marked as whole when it was stopped early."""
        size = len(group.get("scores", ()))
        if self.early_stop.is_on and size != self.config.group_size:
            group["group_overrides"] = {**(group.get("group_overrides") or {}), "group_size": size}
        return group

    async def postprocess_histories(self, trajectories: Trajectories) -> Trajectories:
        """Optional: change the groups of one item before they are checked and stored."""
        return trajectories

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Optional: measure the model; called every `steps_per_eval` steps, and by the evaluate command."""
        logger.warning("%s has no evaluation: it does not define evaluate()", type(self).__name__)

    async def cleanup(self) -> None:
        """Optional: called after every rollout."""

    async def teardown(self) -> None:
        """Optional: free what `setup` made (sandboxes, clients); called once at the end of every mode.

        Also after an error, a signal, or when `setup` failed or was not needed, because the run was complete already.
        """

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Keep `data` (attribute name -> JSON value) for `load_checkpoint`; subclasses add keys, then call this."""
        if data is not None:
            checkpoints.save(self.checkpoint_dir, self.wandb_prepend or self.label, step, data)

    def load_checkpoint(self) -> None:
        """Set the attributes kept by the newest checkpoint that is not ahead of `curr_step`."""
        path = checkpoints.newest(self.checkpoint_dir, self.wandb_prepend or self.label, self.curr_step)
        if path is None:
            return
        logger.info("checkpoint loaded: %s", path)
        for key, value in json.loads(path.read_text("utf-8")).items():
            setattr(self, key, value)

    async def evaluate_log(
        self,
        metrics: dict[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: dict[str, Any] | None = None,
        samples: list[dict[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Write `metrics.json` (and `samples.jsonl`) of one evaluation to `data_dir_to_save_evals`."""
        from atroposlib.envs.eval import evaluate_log

        folder = self.config.data_dir_to_save_evals
        if folder is None:
            logger.warning("evaluation results are not kept: env.data_dir_to_save_evals is not set")
            return
        servers = self.server.servers
        await asyncio.to_thread(
            evaluate_log,
            metrics,
            eval_dir=str(expand_path(folder, what="env.data_dir_to_save_evals")),
            task_name=task_name or f"{self.name or type(self).__name__}_eval",
            model_name=model_name or (servers[0].config.model_name if servers else None),
            start_time=start_time,
            end_time=end_time,
            generation_parameters={"max_new_tokens": self.config.max_token_length, **(generation_parameters or {})},
            samples=samples,
            verbose=verbose,
        )

    @classmethod
    async def preview(cls, settings: "Settings") -> list[str]:
        """Optional: lines about the items of a run, shown by --check; ConfigError when there can be none."""
        return []

    @classmethod
    def extra_namespaces(cls, mode: str) -> dict[str, type[BaseModel]]:
        """Optional: more groups of settings by prefix, for flags `--<prefix>.<field>` and YAML keys."""
        return {}

    @classmethod
    def from_settings(cls, settings: "Settings") -> Self:
        """Optional: make the environment from the resolved settings of a command."""
        env = cls(settings.env, settings.servers, settings.manager.slurm, settings.manager.testing)
        env.use_manager_settings(settings)
        return env

    def use_manager_settings(self, settings: "Settings") -> None:
        """What is set for the servers as a whole; for whoever overrides `from_settings`."""
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
    def get_cli_serve_config_cls(cls) -> type[Any]:
        """The serve command: a class made from the command line, with a `run()` method."""
        from atroposlib.envs.cli import make_command

        return make_command(cls, "serve")

    @classmethod
    def get_cli_process_config_cls(cls) -> type[Any]:
        """The process command: a class made from the command line, with a `run()` method."""
        from atroposlib.envs.cli import make_command

        return make_command(cls, "process")

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> type[Any]:
        """The evaluate command: a class made from the command line, with a `run()` method."""
        from atroposlib.envs.cli import make_command

        return make_command(cls, "evaluate")

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
        """The exit code."""
        from atroposlib.envs.kept_evaluation import run_evaluate

        return await self._torn_down(run_evaluate(self))

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
        item, work = self.running_items[item_uuid]["item"], current_work.get()
        started = asyncio.get_running_loop().time()
        durations = self.failed_task_duration
        try:
            result, backlog = await self._collect(item)
            if result:
                result = await self.postprocess_histories(result)
            if work:
                work.rolled_out(backlog or [])
                await asyncio.sleep(0)  # the next request goes out before this group is checked and stored
            self.backlog.extend(backlog or [])
            stored = await self.handle_send_to_api(
                result,
                item,
                do_send_to_api=not self.process_mode,
                abort_on_any_max_length_exceeded=not self.process_mode,
            )
            if stored:
                durations, self.last_completed_item = self.succeeded_task_duration, item
            return result
        finally:
            seconds = asyncio.get_running_loop().time() - started
            self.task_duration.append(seconds)
            durations.append(seconds)
            self.task_successful.append(int(durations is self.succeeded_task_duration))
            with logged("cleanup failed"):  # of a group that may be stored already
                await self._cleaned_up()

    async def _cleaned_up(self) -> None:
        ended = self.cleanup()
        if ended is not None:  # some environments define a plain function
            limit_s = self.config.worker_timeout
            async with asyncio.timeout(limit_s if limit_s > 0 else None):
                await ended

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
        usable: list[ScoredDataGroup] = []
        dropped_for = NO_GROUP
        for given in group_checks.as_groups(scored_data):
            group = self._without_unscored(given)
            reason = group_checks.reject_reason(
                group,
                group_size=self.config.group_size,
                distinct_scores=self.config.ensure_scores_are_not_same,
            )
            if reason is None:
                await self._prepare(group, item)
                usable.append(group)
            else:
                self._note_rejected(reason, group.get("scores", []))
                dropped_for = reason
        if self._run is None:
            return 0
        work = current_work.get() or self._run.work_outside(item)
        if not usable:
            await self._run.sink.reject(work, dropped_for)
            return 0
        send = [do_send_to_api and self._fits(group, abort_on_any_max_length_exceeded) for group in usable]
        stored = await self._run.sink.store(usable, work, send=send)
        self.items_sent_this_step += len(usable)
        if self.process_mode:
            self.curr_step += 1
        return stored

    def _without_unscored(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """The group itself, or that of the rows that can be used when a fault of one must not cost the others."""
        group_checks.check_shape(group)
        odd = group_checks.make_rows_plain(cast(dict[str, Any], group))
        faults = {**group_checks.row_faults(group), **odd}
        if not faults:
            return group
        if len(faults) == len(group.get("scores", ())):
            raise_first(list(faults.values()))
        return group_checks.without_rows(group, faults, group_size=self.config.group_size, note=self._unscored)

    async def _collect(self, item: Item) -> tuple[Trajectories, list[Item]]:
        result = await self.collect_trajectories(item)
        return result if isinstance(result, tuple) else (result, [])

    async def _prepare(self, group: ScoredDataGroup, item: Item) -> None:
        group_checks.share_params(group)
        for key in group_checks.OPTIONAL_KEYS:
            group.setdefault(key, None)
        self.completion_lengths.extend(group_checks.unmasked_lengths(group))
        if self.config.include_messages or (self._run and self._run.files):
            trace = current_trace()
            missing = group_checks.fill_messages(cast(dict[str, Any], group), trace.chats if trace else None)
            self.odd_rows.note(group_checks.NO_CHAT, missing)
        await self.add_rollouts_for_wandb(group, item)

    def _note_rejected(self, reason: str, scores: Sequence[float]) -> None:
        self.items_rejected += 1
        if self._run:
            self._run.progress.dropped.note(reason, list(map(float, scores)))
        logger.log(
            logging.WARNING if reason != group_checks.EQUAL_SCORES else logging.DEBUG, "group dropped: %s", reason
        )

    def _fits(self, group: ScoredDataGroup, abort_when_too_long: bool) -> bool:
        """Whether the trainer takes a group of this size with sequences this long; unknown counts as yes."""
        size, batch_size = len(group.get("scores", ())), self.config.batch_size
        if self.early_stop.is_on and size != self.config.group_size:
            return False
        if group.get("unscored") and batch_size > 0 and not can_sum({self.config.group_size}, batch_size, size):
            logger.warning("group not sent: sequences=%d never add up to batch_size=%d", size, batch_size)
            self.items_rejected += 1
            return False
        longest = group_checks.longest_sequence(group)
        if self.max_token_len <= 0 or longest < self.max_token_len or not abort_when_too_long:
            return True
        logger.warning("group not sent: longest_sequence=%d trainer_max_token_len=%d", longest, self.max_token_len)
        self.items_rejected += 1
        if self._run:
            dropped = self._run.progress.dropped
            dropped.withheld, dropped.longest = dropped.withheld + 1, max(dropped.longest, longest)
        return False

    # -- what the runtime asks ---------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The environment's name in files, groups and logs; a part of file names, so without slashes."""
        return (self.name or type(self).__name__).replace("/", "_")

    @property
    def has_get_item(self) -> bool:
        """Whether the author defined `get_item`."""
        return type(self).get_item is not BaseEnv.get_item

    @property
    def wandb_module(self) -> ModuleType:
        """The wandb package, imported when it is first needed."""
        return sys.modules[__name__].wandb

    async def check_engines(self) -> bool:
        """Raise ConfigError when the tokenizer is not the engines'; False when one did not answer: ask again."""
        if not isinstance(self.server, ServerManager):  # an author's own
            return True
        return await self.server.check_tokenizer(self.tokenizer, self.config.tokenizer_name)

    def attach(self, run: Run) -> None:
        """Use this run's sink from now on."""
        self._run = run
        if run.journal is not None:
            streams = self.config.response_journal == "tokens"
            folder = self.config.reuse_rollouts
            self.server.keep_responses(
                OneByOne(
                    run.journal,
                    streams=streams,
                    seed=self.config.response_seed,
                    earlier=EarlierRollouts(expand_path(folder, what="env.reuse_rollouts")) if folder else None,
                )
            )

    def write_html(self, rollouts: str, output: str) -> None:
        """Render one rollout file."""
        generate_html(rollouts, output)

    def progress_path(self) -> Path | None:
        """Where the user wants the progress file; None: next to the rollouts, if there are any."""
        path = self.config.progress_path
        return expand_path(path, what="env.progress_path") if path else None

    def run_files(self) -> RunFiles | None:
        """Where rollouts go by the settings; None when none are written.

        Raises:
            ValueError: process mode without any place to write to.
        """
        config = self.config
        progress = self.progress_path()
        if config.rollouts_dir is None and config.data_path_to_save_groups:
            path = expand_path(config.data_path_to_save_groups, what="env.data_path_to_save_groups")
            if path.is_dir():
                raise PathError(
                    f"env.data_path_to_save_groups is {path}, a folder; give a file, or set env.rollouts_dir"
                )
            return RunFiles(path.parent, path.stem, self.label, config.run_name, path, progress)
        wanted = config.dump_rollouts or config.total_groups is not None or config.rollouts_dir is not None
        if not self.process_mode and not wanted:
            return None
        if self.process_mode and config.rollouts_dir is None:
            raise ConfigError("process needs a place for its groups; set --env.data_path_to_save_groups FILE.jsonl")
        folder = expand_path(config.rollouts_dir or "data", what="env.rollouts_dir")
        stem = f"{self.label}_rollouts_{config.run_name}"
        return RunFiles(folder, stem, self.label, config.run_name, None, progress)

    @classmethod
    def has_own_tokenizer(cls) -> bool:
        """True where a subclass makes its tokenizer in its own way."""
        return cls.load_tokenizer is not BaseEnv.load_tokenizer

    def load_tokenizer(self) -> Any:
        """The tokenizer of `tokenizer_name`: a folder, a .gguf file, a model of the embedded engine, or a hub name.

        Where the setting is left at its default, the tokenizer follows the model that the servers name or serve.
        """
        from atroposlib.envs.server_handling.engine_identity import load_for

        tokenizer, self.config.tokenizer_name = load_for(self.config.tokenizer_name, self.server_configs)
        return tokenizer
