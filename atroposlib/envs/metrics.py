"""Metrics of an environment, the table of its rollouts, and its wandb run, which starts without ever asking anything.

Nothing here blocks the event loop.
"""

import asyncio
import logging
import netrc
import os
import random
import statistics
import string
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from types import ModuleType
from typing import TYPE_CHECKING

from atroposlib.envs.hooks import EnvHooks, Metrics
from atroposlib.type_definitions import JsonObject, ScoredDataGroup

if TYPE_CHECKING:
    from atroposlib.api.client import EnvClient

logger = logging.getLogger(__name__)

PROJECT_POLL_S = 1.0


async def start_run(env: EnvHooks, api: Callable[[], "EnvClient"]) -> None:
    """Start the wandb run: in the trainer's project when serving, once the trainer named it to the `api`."""
    if not env.config.use_wandb:
        return
    while not env.process_mode and env.wandb_project is None:
        info = await api().wandb_info()
        env.wandb_group, env.wandb_project = info["group"], info["project"]
        if env.wandb_project is None:  # no trainer yet; one that names no project says ""
            await asyncio.sleep(PROJECT_POLL_S)
    await start_wandb(
        env.wandb_module,
        name=run_name(env.config.wandb_name or env.label),
        project=env.wandb_project or None,
        group=env.wandb_group or None,
        config=env.config.model_dump(mode="json"),
    )


async def log(env: EnvHooks, wandb_metrics: Metrics) -> None:
    """Log these with the metrics every environment has, then empty its buffers; without wandb only the latter."""
    if env.config.use_wandb:
        shown = await env.create_rollout_table(wandb_metrics)
        shown.update(completion_length_metrics(env.completion_lengths, env.max_token_len))
        shown["train/items_sent_to_api"] = env.items_sent_this_step
        shown["train/items_rejected"] = env.items_rejected
        shown = env.perf_stats(shown)
        if env.wandb_prepend:
            shown = {f"{env.wandb_prepend}_{key}": value for key, value in shown.items()}
        for i, server in enumerate(env.server.servers):
            await server.wandb_metrics(shown, f"server_{i}")
        await asyncio.to_thread(env.wandb_module.log, shown, step=env.curr_step)
    env.rollouts_for_wandb.clear()
    env.completion_lengths.clear()
    for samples in timings(env).values():
        samples.clear()


def timings(env: EnvHooks) -> dict[str, list[float]]:
    """The environment's own lists of seconds and counts, by the name of their metrics."""
    return {
        "task_duration": env.task_duration,
        "succeeded_task_duration": env.succeeded_task_duration,
        "failed_task_duration": env.failed_task_duration,
        "mainloop_timings": env.mainloop_timings,
        "workers_added_per_attempt": env.workers_added_list,  # pyright: ignore[reportReturnType]
    }


def keep_for_table(env: EnvHooks, group: ScoredDataGroup) -> None:
    """Keep the decoded text and score of some rollouts of a group."""
    if not env.config.use_wandb:
        return
    tokens, scores = group.get("tokens", []), group.get("scores", [])
    wanted = env.config.num_rollouts_per_group_for_logging
    shown = slice(None if wanted == -1 else wanted)
    env.rollouts_for_wandb.append(
        [(env.tokenizer.decode(ids), score) for ids, score in zip(tokens[shown], scores[shown], strict=True)]
    )
    del env.rollouts_for_wandb[: -env.config.num_rollouts_to_keep or None]


def add_table(env: EnvHooks, into: Metrics) -> Metrics:
    """Add the kept rollouts as the table `train/rollouts`."""
    if env.rollouts_for_wandb:
        table = env.wandb_module.Table(columns=["text", "score"])
        for group in env.rollouts_for_wandb:
            for row in group:
                table.add_data(*row)
        into["train/rollouts"] = table
    return into


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


def perf_metrics(samples: Mapping[str, list[float]], into: Metrics) -> Metrics:
    """Add mean, std, max and min of every list with more than one sample, and empty it."""
    from atroposlib.utils.metrics import get_std_min_max_avg

    for name, values in samples.items():
        if len(values) > 1:
            get_std_min_max_avg(f"train_perf/{name}", values, into)
            values.clear()
    return into


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
