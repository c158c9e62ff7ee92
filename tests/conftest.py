"""Settings of every test: no hub, no wandb, no colour; the whole suite runs on every core."""

import os
import sys
from pathlib import Path

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("NO_COLOR", "1")

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Hundreds of processes import the package: it is compiled once, not by each of them."""

ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
"""Processes that tests start run this checkout, wherever they start, and whatever is installed."""

for limit in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, limit, 60.0)
"""Five seconds are little for a process that a busy machine keeps waiting."""

LONGEST = (
    "launch/test_datagen_run.py",
    "scale/test_drill.py",
    "rollouts/test_auto_concurrency.py",
    "api/test_durability.py",
)
"""Files that begin first, so that none of them is what the other cores wait for in the end."""
MOST_WORKERS = 8


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spread the whole suite over the cores, file by file. Named files run here, and so does everything with `-n0`."""
    options, cores = config.option, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    has_choice = getattr(options, "numprocesses", 0) is None and not hasattr(config, "workerinput")  # pytest-xdist's
    if is_whole and has_choice and not options.collectonly and not options.usepdb and (cores or 1) > 1:
        # Most tests wait, for processes and deadlines, for more than half of their time.
        options.numprocesses, options.dist = min(2 * (cores or 1) + 1, MOST_WORKERS), "loadfile"
        options.loadscopereorder = False  # it would begin with the files of most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))
