"""Metrics of an environment, and its wandb run, which starts without ever asking anything or blocking the loop."""

import asyncio
import logging
import netrc
import os
import random
import statistics
import string
from collections.abc import Mapping, Sequence
from datetime import date
from types import ModuleType
from typing import Any

from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

PROJECT_POLL_S = 1.0
Metrics = dict[str, Any]
"""Name -> number, or a table or an image of wandb's."""


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
