"""Collect demonstrations: attempts in worker processes, each recorded as soon as those before it are.

    atropos collect causal --size small --output demos --workers 8

Attempt k of a level depends on the seed, the level and k alone, and lines are written in one order, so the files are
the same for any number of workers and after any interruption. Every attempt is kept; `accepted` says which ones pass.
The files are rollout files: one writer, no torn or doubled line, the index is the progress.
"""

import asyncio
import importlib
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson
import yaml

from atroposlib.data.rollout_files import sound_lines
from atroposlib.data.set_aside import SetAside
from atroposlib.environments.causal.demonstration import ENV, DemonstrationConfig, demo_name, run_name
from atroposlib.errors import ConfigError, DataError
from atroposlib.paths import writable_dir, write_text_atomic
from atroposlib.rollouts.early_stop import RunLimits
from atroposlib.rollouts.failures import FailureLog, TaskHealth, describe_error
from atroposlib.rollouts.files import RolloutFiles, compress
from atroposlib.rollouts.ledger import Totals
from atroposlib.rollouts.locations import RunFiles
from atroposlib.rollouts.progress import Progress
from atroposlib.rollouts.source import Work
from atroposlib.rollouts.stop import StopSignals
from atroposlib.sandbox.workers import SandboxError, WorkerPool
from atroposlib.status.table import duration
from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

SIZES = {"small": 1_000, "medium": 10_000, "large": 100_000, "xlarge": 500_000}
EXPERT = "atroposlib.environments.causal.demonstration:demonstration_text"
RUN = "demonstrations"
LINES_PER_FILE = 5_000
SAY_EVERY_S = 10.0
_WRITE_EVERY_S = 1.0
_LAST_WRITE_S = 2.0
_FAILURES_IN_A_ROW = 10
Make = Callable[[str, int], Awaitable[JsonObject]]
"""From level and index to a record."""

_AHEAD = 4
"""Attempts per worker that may be finished or running before the one that is written next."""


@dataclass(frozen=True)
class Plan:
    """Settings of a collection. Attempts are of all levels together, spread evenly."""

    levels: list[str]
    attempts: int
    target_accepted: int | None = None  # per level; then `attempts` is not used
    max_attempts: int | None = None  # per level, with `target_accepted`; None: five times that

    def most(self, level: str) -> int:
        """Return how often a level is tried at most."""
        if self.target_accepted is not None:
            return self.max_attempts or 5 * self.target_accepted
        share, rest = divmod(self.attempts, len(self.levels))
        return share + (self.levels.index(level) < rest)


class Levels:
    """Which attempts come next, and which levels are closed; counts only what is recorded."""

    def __init__(self, plan: Plan, attempts: Mapping[str, int], accepted: Mapping[str, int]) -> None:
        self.plan = plan
        self.attempts, self.accepted = Counter(attempts), Counter(accepted)

    def is_open(self, level: str) -> bool:
        """Return whether a further attempt of the level is wanted."""
        target = self.plan.target_accepted
        return self.attempts[level] < self.plan.most(level) and (target is None or self.accepted[level] < target)

    def order(self, is_done: Callable[[str, int], bool]) -> Iterator[tuple[str, int]]:
        """Give the attempts that are not done: the first of every level, the second, ...; without closed levels."""
        for index in range(max(map(self.plan.most, self.plan.levels))):
            for level in self.plan.levels:
                if index < self.plan.most(level) and self.is_open(level) and not is_done(level, index):
                    yield level, index

    def add(self, level: str, is_accepted: bool) -> None:
        """Count a recorded attempt."""
        self.attempts[level] += 1
        self.accepted[level] += is_accepted

    def shortfalls(self) -> list[str]:
        """Return a sentence for each level that ended below its target."""
        target = self.plan.target_accepted
        return [
            f"{level}: {self.accepted[level]} accepted of {self.attempts[level]} attempts, wanted {target}"
            for level in self.plan.levels
            if target is not None and self.accepted[level] < target
        ]


class _Accepted(msgspec.Struct):
    accepted: bool


class _Facts(msgspec.Struct):
    task: str
    demonstration: _Accepted


class Collection:
    """One run of `collect` on a folder. Made inside a running loop."""

    def __init__(self, folder: Path, config: DemonstrationConfig, plan: Plan, *, lines_per_file: int) -> None:
        """Lock the folder and read what is done.

        Raises:
            ConfigError: it was begun with other settings.
            LaunchError: another process writes it. PathError: it cannot be written.
        """
        where = _where(folder)
        self.files = RolloutFiles(
            where,
            groups_per_shard=lines_per_file,
            accept_score=config.min_accuracy - 1e-9,
            sends=False,
        )
        self.config = config.model_dump()
        self.run_name = run_name(self.config)
        try:
            self._same_settings(where.sidecar("config.yaml"))
            write_text_atomic(where.sidecar("plan.yaml"), yaml.safe_dump(asdict(plan), sort_keys=False))
            self.levels = Levels(plan, self._recorded(), self._accepted() if plan.target_accepted else {})
        except BaseException:
            self.files.close()
            raise
        self.failures = FailureLog(where.failures, env=ENV, run=RUN)
        self.progress = Progress(
            path=where.progress_path,
            env=ENV,
            mode="collect",
            limits=RunLimits(groups=sum(map(plan.most, plan.levels))),
            totals=self.files.ledger.totals,
            failures=self.failures,
            health=TaskHealth(10**9, run_limit=10**9),
            rollouts=list(where.shards().values()),
        )
        self.failed = self._in_a_row = 0
        self.files.on_wait = lambda what: self.progress.wait_for("disk", what)

    def _key(self, level: str, index: int) -> str:
        return demo_name(self.config["problem"]["seed"], level, index)

    def _same_settings(self, path: Path) -> None:
        if not path.exists():
            write_text_atomic(path, yaml.safe_dump(self.config, sort_keys=False))
            return
        before = yaml.safe_load(path.read_text("utf-8"))
        if before != self.config:
            changed = ", ".join(sorted(_differences(before, self.config)))
            raise ConfigError(
                f"{path.parent} was begun with other settings ({changed}); one set has one kind of demonstration: "
                "give the same settings, or another --output"
            )

    def _recorded(self) -> dict[str, int]:
        return {task: count.groups for task, count in self.files.ledger.totals.tasks.items()}

    def _accepted(self) -> Counter[str]:
        """Return the accepted demonstrations by level, read from the lines: the index holds accuracies alone."""
        decoder, found = msgspec.json.Decoder(_Facts), Counter[str]()
        for path in self.files.files.shards().values():
            for line in sound_lines(path, SetAside()):
                try:
                    facts = decoder.decode(line.data)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue  # its attempt is made again
                found[facts.task] += facts.demonstration.accepted
        return found

    async def run(self, make: Make, ahead: int) -> bool:
        """Make what is missing; returns whether all is done (False: a signal asked to stop, or attempts failed).

        Args:
            ahead: attempts that may be under way at once.

        Raises:
            DataError: nothing but failures. OSError: the disk stayed full.
        """
        order = self.levels.order(lambda level, index: self._key(level, index) in self.files.ledger.done)
        running: deque[tuple[str, int, asyncio.Task[JsonObject | SandboxError]]] = deque()
        writing: asyncio.Task[None] | None = None
        stop = StopSignals()
        stop.catch()
        stopped = asyncio.create_task(stop.requested.wait())
        ticking = asyncio.create_task(self._tick())
        self.progress.state = "running"
        try:
            while not stopped.done():
                while len(running) < ahead and (following := next(order, None)) is not None:
                    running.append((*following, asyncio.create_task(self._tried(make, *following))))
                if not running:
                    break
                level, index, task = running[0]
                self.progress.in_flight = len(running)
                await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    break
                running.popleft()
                if not self.levels.is_open(level):
                    continue  # begun ahead of the one that closed the level: no attempt
                if isinstance(record := task.result(), SandboxError):
                    self._fail(level, index, record)
                    continue
                self._in_a_row = 0
                writing = asyncio.create_task(self._record(level, record))
                await asyncio.wait([writing, stopped], return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    writing.result()
                else:
                    await asyncio.wait([writing], timeout=_LAST_WRITE_S)
            is_done = not stopped.done() and not self.failed
            self.progress.state = "done" if is_done else "stopped"
            return is_done
        except BaseException as error:
            self.progress.state, self.progress.last_error = "failed", describe_error(error)
            raise
        finally:
            stop.release()
            for task in (ticking, stopped, *(task for *_, task in running)):
                task.cancel()
            self.files.close()
            await asyncio.gather(
                stopped, *(task for *_, task in running), *filter(None, [writing]), return_exceptions=True
            )
            self.progress.in_flight = 0
            self.progress.rollouts = list(self.files.files.shards().values())
            self.progress.write()

    async def _record(self, level: str, record: Mapping[str, Json]) -> None:
        await self.files.append([{"schema_version": 1, "env": ENV, "run": self.run_name, **record}])
        self.levels.add(level, record["demonstration"]["accepted"])

    async def _tried(self, make: Make, level: str, index: int) -> JsonObject | SandboxError:
        """Return an attempt's record, or why there is none; tried twice, as a worker may have been killed once."""
        try:
            return await make(level, index)
        except SandboxError as error:
            logger.warning("attempt %d of %s is made again: %s", index, level, error)
        try:
            return await make(level, index)
        except SandboxError as error:
            return error

    def _fail(self, level: str, index: int, error: SandboxError) -> None:
        """Note that an attempt has no record.

        Raises:
            DataError: that was one failure too many with nothing in between.
        """
        self.failed += 1
        self._in_a_row += 1
        item = {"level": level, "index": index}
        self.failures.add(Work(item=item, key=self._key(level, index), task=level), error, is_final=True)
        if self._in_a_row >= _FAILURES_IN_A_ROW:
            raise DataError(
                f"{self._in_a_row} attempts in a row failed, the last with: {error}. What is recorded stays; the same "
                "command continues once the cause is gone (out of memory: a larger --memory-limit)"
            )

    async def _tick(self) -> None:
        said = time.monotonic()
        while True:
            self.progress.sample()
            await self.files.sync()
            self.progress.rollouts = await self.files.listed()
            await asyncio.to_thread(self.progress.write)
            if time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                logger.info("%s", self.line())
            await asyncio.sleep(_WRITE_EVERY_S)

    def line(self) -> str:
        """Return the progress in one line, by level."""
        totals: Totals = self.files.ledger.totals
        rate, eta = self.progress.rates()[0], self.progress.eta_s()
        by_level = ", ".join(
            f"{level.removeprefix('difficulty_')}: {count.accepted}/{count.groups}"
            for level, count in sorted(totals.tasks.items())
        )
        left = f", ETA {duration(eta)}" if eta is not None else ""
        return (
            f"{totals.groups}/{self.progress.limits.groups} attempts, {rate:.1f}/s{left}; accurate by level {by_level}"
        )


async def collect(
    output: str | Path,
    config: DemonstrationConfig,
    plan: Plan,
    *,
    workers: int,
    serial: bool = False,
    timeout_s: float = 600.0,
    memory_mb: int = 4096,
    lines_per_file: int = LINES_PER_FILE,
    compressed: bool = False,
    function: str = EXPERT,
) -> Collection:
    """Collect into a folder, continuing what is there; returns the collection as it ended.

    Args:
        serial: in this process, one after the other, for a debugger.
        timeout_s: for one attempt. memory_mb: address space of one worker.
        compressed: full files become `.jsonl.zst`.
        function: `module:name` of what makes a record, or its JSON text, from config, level and index.

    Raises:
        ConfigError, PathError, LaunchError: as `Collection`. DataError: nothing but failures.
    """
    collection = Collection(writable_dir(output, what="--output"), config, plan, lines_per_file=lines_per_file)
    if compressed:
        collection.files.on_shard_complete(_compress)
    if serial:
        await collection.run(_in_this_process(function, collection.config), 1)
        return collection
    pool = WorkerPool(workers=workers, timeout_s=timeout_s, memory_mb=memory_mb)

    async def make(level: str, index: int) -> JsonObject:
        return _record(await pool.call(function, collection.config, level, index))

    try:
        await collection.run(make, _AHEAD * workers)
        return collection
    finally:
        await asyncio.to_thread(pool.close)


def _compress(path: Path) -> None:
    try:
        compress(path)
    except OSError as error:  # a full disk: the plain file stays
        logger.warning("not compressed: file=%s error=%s", path, error)


def _in_this_process(function: str, config: JsonObject) -> Make:
    module, _, name = function.partition(":")
    made = getattr(importlib.import_module(module), name)

    async def make(level: str, index: int) -> JsonObject:
        await asyncio.sleep(0)  # signals and progress have their turn
        return _record(made(config, level, index))

    return make


def _record(made: str | JsonObject) -> JsonObject:
    return orjson.loads(made) if isinstance(made, str) else made


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif before != now:
        yield f"{name} was {before!r}, is {now!r}"


def begun(folder: Path) -> tuple[DemonstrationConfig, Plan]:
    """Return the settings and the plan that a folder was begun with.

    Raises:
        ConfigError: nothing was begun there.
    """
    where = _where(folder)
    try:
        config, plan = (yaml.safe_load(where.sidecar(name).read_text("utf-8")) for name in ("config.yaml", "plan.yaml"))
        return DemonstrationConfig.model_validate(config), Plan(**plan)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"--resume {folder}: no collection was begun there ({error})") from None


def _where(folder: Path) -> RunFiles:
    return RunFiles(folder, f"{ENV}_rollouts_{RUN}", ENV, RUN, progress=folder / "progress.json")
