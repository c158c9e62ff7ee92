"""Hooks that an author of an environment defines, with their defaults, and the attributes of an environment.

`BaseEnv` is made of this and of two parts that are handed it, `ItemRollout` (rolls out and checks items) and
`TrainerLink` (follows a trainer). They call the hooks, which may be an author's own; the hooks that need a part
itself are those of `BaseEnv`, which hands them on.

Checkpoints are small JSON files of attributes, `<checkpoint_dir>/env_checkpoints/<registered name>/step-<step>.json`. A
restarted environment may be registered under another name (`gsm8k_1` after `gsm8k_0`) and at a step between two
checkpoints, so the newest one that is not ahead of the trainer counts. An empty `checkpoint_dir` is a trainer that
keeps none: nothing is written or found.
"""

import asyncio
import json
import logging
import netrc
import os
import random
import re
import statistics
import string
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.paths import expand_path, write_text_atomic
from atroposlib.rollouts.early_stop import EarlyStop
from atroposlib.rollouts.groups import merge_items
from atroposlib.rollouts.run import Run
from atroposlib.type_definitions import UUID, Item, JsonObject, ScoredDataGroup, ScoredDataItem, Tokenizer

if TYPE_CHECKING:
    from atroposlib.envs.cli import Settings

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)\.json")
_INDEX = re.compile(r"_\d+$")

PROJECT_POLL_S = 1.0
Metrics = dict[str, Any]
"""Name -> number, or a table or an image of wandb's."""

ServerConfigs = ServerBaseline | Sequence[APIServerConfig]
Trajectories = ScoredDataGroup | list[ScoredDataGroup | None] | None


class EnvHooks:
    """One environment as its author sees it. Attributes have the names that they have in 0.4.0."""

    name: str | None = None
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig

    config: BaseEnvConfig
    server_configs: list[APIServerConfig]
    server: ServerManager
    tokenizer: Tokenizer
    max_num_workers: int
    settings_text: str | None = None  # the resolved settings as YAML, kept next to the rollouts
    fresh = False  # start a new run instead of resuming one
    last_completed_item: Item | None = None
    jsonl_writer = None  # upstream's attribute; rollout files are written by `atroposlib.rollouts.files`

    current_run: Run | None = None
    process_mode = False
    curr_step = 0
    max_token_len = -1  # tokens of the longest sequence the trainer takes; -1: unknown
    items_sent_this_step = 0
    env_id = 0
    wandb_project: str | None = None
    wandb_group: str | None = None
    wandb_prepend: str | None = None  # the name that the trajectory API gave this environment
    checkpoint_dir = ""
    checkpoint_interval = -1
    eval_runner: asyncio.Task[object] | None = None

    def __init__(self) -> None:
        self.workers: set[asyncio.Task[None]] = set()
        self.eval_workers: set[asyncio.Task[object]] = set()
        self.backlog: list[Item] = []
        self.running_items: dict[UUID, JsonObject] = {}
        self.status_dict: JsonObject = {"queue_size": 0, "current_step": 0, "env_weight": 1.0}
        self.rollouts_for_wandb: list[list[tuple[str, float]]] = []
        self.completion_lengths: list[int] = []
        self.task_duration: list[float] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.task_successful: list[int] = []
        self.mainloop_timings: list[float] = []
        self.workers_added_list: list[float] = []

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

    def joined(self, items: Sequence[ScoredDataItem]) -> ScoredDataGroup:
        """Optional: the group of the rollouts of `collect_trajectory`; another way is for rollouts of several rows."""
        return merge_items(items)

    async def postprocess_histories(self, trajectories: Trajectories) -> Trajectories:
        """Optional: change the groups of one item before they are checked and stored."""
        return trajectories

    async def evaluate(self, *args: object, **kwargs: object) -> object:
        """Optional: measure the model; called every `steps_per_eval` steps, and by the evaluate command."""
        logger.warning("%s has no evaluation: it does not define evaluate()", type(self).__name__)

    async def cleanup(self) -> None:
        """Optional: called after every rollout."""

    async def teardown(self) -> None:
        """Optional: free what `setup` made (sandboxes, clients); called once at the end of every mode.

        Also after an error, a signal, or when `setup` failed or was not needed, because the run was complete already.
        """

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

    @classmethod
    async def preview(cls, settings: "Settings") -> list[str]:
        """Optional: lines about the items of a run, shown by --check; ConfigError when there can be none."""
        return []

    @classmethod
    def extra_namespaces(cls, mode: str) -> dict[str, type[BaseModel]]:
        """Optional: more groups of settings by prefix, for flags `--<prefix>.<field>` and YAML keys."""
        return {}

    @property
    def label(self) -> str:
        """The environment's name in files, groups and logs; a part of file names, so without slashes."""
        return (self.name or type(self).__name__).replace("/", "_")

    @property
    def has_get_item(self) -> bool:
        return type(self).get_item is not EnvHooks.get_item

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of `tokenizer_name`: a folder, a .gguf file, a model of the embedded engine, or a hub name.

        Where the setting is left at its default, the tokenizer follows the model that the servers name or serve.
        """
        from atroposlib.envs.server_handling.token_server import load_for

        tokenizer, self.config.tokenizer_name = load_for(self.config.tokenizer_name, self.server_configs)
        return tokenizer

    @classmethod
    def has_own_tokenizer(cls) -> bool:
        """True where a subclass makes its tokenizer in its own way."""
        return cls.load_tokenizer is not EnvHooks.load_tokenizer

    # -- metrics and checkpoints -----------------------------------------------------------------------------------

    @property
    def wandb_module(self) -> ModuleType:
        """The wandb package, imported when it is first needed, by the name that authors' tests replace."""
        return sys.modules["atroposlib.envs.base"].wandb

    async def wandb_log(self, wandb_metrics: Metrics | None = None) -> None:
        """Log `wandb_metrics` with the metrics every environment has, then empty the buffers.

        Subclasses add their keys and call this. Without wandb only the buffers are emptied.
        """
        if self.config.use_wandb:
            shown = await self.create_rollout_table({} if wandb_metrics is None else wandb_metrics)
            shown.update(completion_length_metrics(self.completion_lengths, self.max_token_len))
            shown["train/items_sent_to_api"] = self.items_sent_this_step
            shown["train/items_rejected"] = len(self.failed_task_duration)
            shown = self.perf_stats(shown)
            if self.wandb_prepend:
                shown = {f"{self.wandb_prepend}_{key}": value for key, value in shown.items()}
            for i, server in enumerate(self.server.servers):
                await server.wandb_metrics(shown, f"server_{i}")
            await asyncio.to_thread(self.wandb_module.log, shown, step=self.curr_step)
        self.rollouts_for_wandb.clear()
        self.completion_lengths.clear()
        for samples in self._timings().values():
            samples.clear()

    def perf_stats(self, metrics_dict: Metrics) -> Metrics:
        """Add mean, std, max and min of the durations with more than one sample, which are then forgotten."""
        from atroposlib.utils.metrics import get_std_min_max_avg

        for name, values in self._timings().items():
            if len(values) > 1:
                get_std_min_max_avg(f"train_perf/{name}", values, metrics_dict)
                values.clear()
        return metrics_dict

    def _timings(self) -> dict[str, list[float]]:
        """The lists of seconds and counts, by the name of their metrics."""
        return {
            "task_duration": self.task_duration,
            "succeeded_task_duration": self.succeeded_task_duration,
            "failed_task_duration": self.failed_task_duration,
            "mainloop_timings": self.mainloop_timings,
            "workers_added_per_attempt": self.workers_added_list,
        }

    async def add_rollouts_for_wandb(self, scored_data: ScoredDataGroup, item: Item = None) -> None:
        """Keep the decoded text and score of some rollouts for the table."""
        if not self.config.use_wandb:
            return
        tokens, scores = scored_data.get("tokens", []), scored_data.get("scores", [])
        wanted = self.config.num_rollouts_per_group_for_logging
        shown = slice(None if wanted == -1 else wanted)
        self.rollouts_for_wandb.append(
            [(self.tokenizer.decode(ids), score) for ids, score in zip(tokens[shown], scores[shown], strict=True)]
        )
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep or None]

    async def create_rollout_table(self, wandb_metrics: Metrics) -> Metrics:
        """Add the kept rollouts as the table `train/rollouts`."""
        if self.rollouts_for_wandb:
            table = self.wandb_module.Table(columns=["text", "score"])
            for group in self.rollouts_for_wandb:
                for row in group:
                    table.add_data(*row)
            wandb_metrics["train/rollouts"] = table
        return wandb_metrics

    def save_checkpoint(self, step: int, data: JsonObject | None = None) -> None:
        """Keep `data` (attribute name -> JSON value) for `load_checkpoint`; subclasses add keys, then call this."""
        if data is not None:
            write_checkpoint(self.checkpoint_dir, self.wandb_prepend or self.label, step, data)

    def load_checkpoint(self) -> None:
        """Set the attributes kept by the newest checkpoint that is not ahead of `curr_step`."""
        path = newest_checkpoint(self.checkpoint_dir, self.wandb_prepend or self.label, self.curr_step)
        if path is not None:
            for key, value in json.loads(path.read_text("utf-8")).items():
                setattr(self, key, value)
            logger.info("checkpoint loaded: %s", path)


def write_checkpoint(checkpoint_dir: str, registered_name: str, step: int, data: JsonObject) -> Path | None:
    """Write the checkpoint of one step as a whole; its path."""
    if not checkpoint_dir:
        return None
    folder = expand_path(checkpoint_dir, what="checkpoint_dir") / "env_checkpoints" / registered_name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step}.json"
    write_text_atomic(path, json.dumps(data))
    return path


def newest_checkpoint(checkpoint_dir: str, registered_name: str, step: int) -> Path | None:
    """The checkpoint to continue with at `step`: the latest one not after it, of this name or its earlier indices."""
    if not checkpoint_dir:
        return None
    root = expand_path(checkpoint_dir, what="checkpoint_dir") / "env_checkpoints"
    base = _INDEX.sub("", registered_name)
    found = [
        (int(match[1]), folder.name == registered_name, path.stat().st_mtime, path)
        for folder in root.glob("*")
        if _INDEX.sub("", folder.name) == base
        for path in folder.glob("step-*.json")
        if (match := _STEP.fullmatch(path.name)) and int(match[1]) <= step
    ]
    return max(found)[-1] if found else None


def completion_length_metrics(lengths: Sequence[int], max_token_len: int) -> dict[str, float]:
    """Statistics of the trained tokens per sequence; `_p95` is the share above 0.95 of `max_token_len`."""
    if not lengths:
        return {}
    metrics = {
        "train/completion_lengths": statistics.fmean(lengths),
        "train/completion_lengths_std": statistics.pstdev(lengths),
        "train/completion_lengths_max": max(lengths),
        "train/completion_lengths_min": min(lengths),
    }
    if max_token_len > 0:
        metrics["train/completion_lengths_p95"] = statistics.fmean(n > 0.95 * max_token_len for n in lengths)
    return metrics


def run_name(prefix: str) -> str:
    """`<prefix>-<YYYY-MM-DD>-<6 letters>`."""
    letters = "".join(random.choices(string.ascii_lowercase, k=6))
    return f"{prefix}-{date.today().isoformat()}-{letters}"


async def start_wandb(
    wandb: ModuleType, *, name: str, project: str | None, group: str | None, config: JsonObject
) -> None:
    """Start the run in a thread; offline, and said once, when there are no credentials."""
    mode = os.environ.get("WANDB_MODE")
    if mode is None and not has_credentials():
        mode = "offline"
        logger.warning("no wandb credentials: logging offline; `wandb sync wandb/offline-run-*` uploads it later")
    settings = {"mode": mode} if mode else {}
    await asyncio.to_thread(wandb.init, name=name, project=project, group=group, config=config, **settings)


def has_credentials() -> bool:
    """True where wandb would find an API key without asking for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0]
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
