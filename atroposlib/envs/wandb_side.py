"""The half of `BaseEnv` that logs: metrics, rollout tables, the wandb run. Nothing here blocks the event loop."""

import asyncio
import logging
from types import ModuleType
from typing import TYPE_CHECKING, Any

from atroposlib.envs import metrics
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.type_definitions import Item, ScoredDataGroup

if TYPE_CHECKING:
    from atroposlib.api.client import EnvClient

logger = logging.getLogger(__name__)

PROJECT_POLL_S = 1.0


class WandbSide:
    """Logging hooks; each may be overridden on its own."""

    config: BaseEnvConfig
    server: ServerManager
    tokenizer: Any
    rollouts_for_wandb: list[Any]
    completion_lengths: list[int]
    task_duration: list[float]
    succeeded_task_duration: list[float]
    failed_task_duration: list[float]
    mainloop_timings: list[float]
    workers_added_list: list[int]

    process_mode: bool = False
    curr_step: int = 0
    max_token_len: int = -1  # tokens of the longest sequence the trainer takes; -1: unknown
    items_sent_this_step: int = 0
    items_rejected: int = 0
    wandb_project: str | None = None
    wandb_group: str | None = None
    wandb_prepend: str | None = None

    @property
    def label(self) -> str:
        raise NotImplementedError

    @property
    def api(self) -> "EnvClient":
        raise NotImplementedError

    @property
    def wandb_module(self) -> ModuleType:
        """The wandb package, imported when it is first needed."""
        raise NotImplementedError

    async def setup_wandb(self) -> None:
        """Start the wandb run: in the trainer's project when serving, once the trainer named it."""
        if not self.config.use_wandb:
            return
        while not self.process_mode and self.wandb_project is None:
            info = await self.api.wandb_info()
            self.wandb_group, self.wandb_project = info["group"], info["project"]
            if self.wandb_project is None:  # no trainer yet; one that names no project says ""
                await asyncio.sleep(PROJECT_POLL_S)
        await metrics.start_wandb(
            self.wandb_module,
            name=metrics.run_name(self.config.wandb_name or self.label),
            project=self.wandb_project or None,
            group=self.wandb_group or None,
            config=self.config.model_dump(mode="json"),
        )

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log `wandb_metrics` with the metrics every environment has, then empty the buffers.

        Subclasses add their keys and call this. Without wandb only the buffers are emptied.
        """
        if self.config.use_wandb:
            shown = await self.create_rollout_table({} if wandb_metrics is None else wandb_metrics)
            shown.update(metrics.completion_length_metrics(self.completion_lengths, self.max_token_len))
            shown["train/items_sent_to_api"] = self.items_sent_this_step
            shown["train/items_rejected"] = self.items_rejected
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

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the durations of rollouts and of the main loop."""
        return metrics.perf_metrics(self._timings(), metrics_dict)

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

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the kept rollouts as the table `train/rollouts`."""
        if self.rollouts_for_wandb:
            table = self.wandb_module.Table(columns=["text", "score"])
            for group in self.rollouts_for_wandb:
                for row in group:
                    table.add_data(*row)
            wandb_metrics["train/rollouts"] = table
        return wandb_metrics

    def _timings(self) -> dict[str, list[float]]:
        return {
            "task_duration": self.task_duration,
            "succeeded_task_duration": self.succeeded_task_duration,
            "failed_task_duration": self.failed_task_duration,
            "mainloop_timings": self.mainloop_timings,
            "workers_added_per_attempt": self.workers_added_list,  # pyright: ignore[reportReturnType]
        }
