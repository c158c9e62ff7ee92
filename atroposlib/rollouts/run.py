"""One process's share of a run: its files, source, pool and progress, and an orderly end.

`Run.supervise` ends in one of three ways: the work is done, a signal asked to stop (everything finished is on disk
within two seconds), or an error that the caller shows.
"""

import asyncio
import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Never, Protocol

from atroposlib.data.rollout_files import html_twin
from atroposlib.errors import AtroposError, ConfigError, DiskError
from atroposlib.json_lines import as_json
from atroposlib.paths import expand_path, write_text_atomic
from atroposlib.rollouts.concurrency import ConcurrencyLimit, queued, running
from atroposlib.rollouts.failures import FailureLog, Fruitless, TaskHealth, describe_error
from atroposlib.rollouts.files import Reports, RolloutFiles
from atroposlib.rollouts.journal import ResponseJournal
from atroposlib.rollouts.locations import RunFiles, choose_run, progress_path
from atroposlib.rollouts.pool import RolloutPool
from atroposlib.rollouts.progress import EngineUse, Progress, ProgressDisplay
from atroposlib.rollouts.shared_run import Leases, SharedDraw
from atroposlib.rollouts.sink import Sender, Sink
from atroposlib.rollouts.source import IndexedDraw, ItemSource, StreamDraw, Work, content_key
from atroposlib.rollouts.standstill import Facts, HeldLoop, Standstill
from atroposlib.rollouts.stop import EXIT_WORK_REMAINS, StopSignals
from atroposlib.type_definitions import Item, JsonObject

logger = logging.getLogger(__name__)

TICK_S = 0.25
SYNC_EVERY_S = 1.0
ENGINES_EVERY_S, LOAD_EVERY_S = 5.0, 0.7  # the second where the load decides the number of rollouts
STOP_TIMEOUT_S = 1.0
CHECK_S, CHECK_AGAIN_S = 10.0, 5.0
RARE_COLLECTIONS = (50_000, 10, 10)
"""Python's own first threshold, 700 containers, is reached several times in every group, and a collection walks through
every list of token ids in flight, millions of integers that hold no references."""

EXIT_DONE = 0


class TrainerLink(Protocol):
    """Tells how many rollouts may run at once, and what holds them back; in `serve` it talks to the trajectory API."""

    api: Any  # `atroposlib.api.client.EnvClient`

    def worker_count(self) -> int: ...
    def first_worker_count(self) -> int: ...
    def evaluating(self) -> str | None: ...
    def held_back(self) -> str | None: ...
    def not_taken(self) -> str | None: ...
    def is_served(self) -> bool: ...


class Environment(Protocol):
    """An environment as a run uses it: `BaseEnv` provides it, authors override the hooks."""

    config: Any
    settings_text: str | None  # kept next to the rollouts
    fresh: bool  # start a new run instead of resuming one
    server: Any
    curr_step: int
    max_token_len: int  # the trainer's longest sequence; -1: it says none
    workers: set[asyncio.Task[None]]
    running_items: dict[str, JsonObject]
    backlog: list[Item]
    mainloop_timings: list[float]  # seconds; a metric of upstream's
    items_sent_this_step: int  # groups, since metrics were logged

    @property
    def trainer_link(self) -> TrainerLink: ...
    @property
    def label(self) -> str: ...  # names the environment in files and groups
    @property
    def has_get_item(self) -> bool: ...
    async def setup(self) -> None: ...
    async def get_next_item(self) -> Item | None: ...
    async def get_item(self, index: int) -> Item | None: ...
    def item_task(self, item: Item) -> str: ...
    async def handle_env(self, item_uuid: str) -> object: ...
    async def check_engines(self) -> bool: ...  # False: one did not answer; ask again
    def engine_down(self) -> str | None: ...
    def outage_timeout_s(self) -> float: ...
    def write_html(self, rollouts: str, output: str) -> None: ...
    def attach(self, run: "Run") -> None: ...
    async def setup_wandb(self) -> None: ...
    async def wandb_log(self, wandb_metrics: JsonObject | None = None) -> None: ...
    async def register_env(self) -> None: ...
    async def get_server_info(self) -> None: ...
    async def get_status(self) -> None: ...
    async def env_step_checks(self) -> None: ...
    async def add_train_workers(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run without an error."""

    exit_code: int
    groups: int
    groups_total: int | None


@dataclass(eq=False)
class EngineWatch:
    """Checks once whether the engines fit; notes and follows how busy they are while a run lasts."""

    _env: Environment
    _progress: Progress
    _concurrency: ConcurrencyLimit | None
    _in_engine: Callable[[], int]  # groups
    tasks: list[asyncio.Task[None]] = field(default_factory=list)  # whoever ends the run cancels them
    _checking: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Refuse to begin with engines that do not fit; one that is silent or slow is checked while the run goes.

        ConfigError: the tokenizer is not an engine's own.
        """
        first = asyncio.create_task(self._env.check_engines())
        self._checking = asyncio.create_task(self._checked(first))
        self.tasks.append(self._checking)
        await asyncio.wait({first, self._checking}, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        self.raise_checked()

    def raise_checked(self) -> None:
        """Raise what the check found, if it has ended."""
        if self._checking is not None and self._checking.done():
            self._checking.result()

    def follow(self, apply_limit: Callable[[int], None]) -> None:
        """Note now and then how busy the engines are. `apply_limit` gets every new limit of `max_num_workers: auto`."""
        self.tasks.append(asyncio.create_task(self._ask()))
        if self._concurrency:
            self.tasks.append(asyncio.create_task(self._concurrency.follow(self._in_engine, apply_limit)))

    async def _checked(self, first: asyncio.Task[bool]) -> None:
        is_checked = await first
        while not is_checked:
            await asyncio.sleep(CHECK_AGAIN_S)
            is_checked = await self._env.check_engines()

    async def _ask(self) -> None:
        slots = 0
        while True:
            said = await self._env.server.engine_loads()
            if self._concurrency:
                self._concurrency.note_loads(said)
            loads = [load for load in said if load.is_known]
            slots = max(slots, running(loads))
            speeds = [load.tokens_s for load in loads if load.tokens_s is not None]
            use = EngineUse(running(loads), queued(loads), slots, sum(speeds) if speeds else None)
            self._progress.engines = use if loads else None
            await asyncio.sleep(LOAD_EVERY_S if self._concurrency else ENGINES_EVERY_S)


class Run:
    """Everything one running environment shares; `BaseEnv` reaches its sink through it. Made inside a running loop."""

    def __init__(
        self, env: Environment, *, mode: str, total: int | None, files: RunFiles | None, sender: Sender | None
    ) -> None:
        """Lock and read the run's files (None: none are written); `sender` takes groups for the trajectory API."""
        config, label = env.config, env.label
        self._env = env
        self._outside: Counter[str] = Counter()  # items stored without having been drawn, for their keys
        self.files = (
            RolloutFiles(
                choose_run(files, fresh=env.fresh),
                groups_per_shard=config.groups_per_shard,
                accept_score=config.accept_score,
                sends=sender is not None,
            )
            if files
            else None
        )
        where = self.files.files if self.files else None
        self.journal = (
            ResponseJournal(where.sidecar("journal"), self.files.ledger.done)
            if self.files and where and config.response_journal != "off"
            else None
        )
        run = where.run if where else config.run_name
        if where and env.settings_text:
            write_text_atomic(where.sidecar("config.yaml"), env.settings_text)
        self.failures = FailureLog(where.failures if where else None, env=label, run=run)
        self.health = TaskHealth(config.task_failure_limit, run_limit=3 * max(config.task_failure_limit, 10))
        self.sink = Sink(
            env=label,
            run=run,
            files=self.files,
            sender=sender,
            total=total,
            accept_score=config.accept_score,
            accepted=config.total_accepted,
            tokens=config.token_budget,
        )
        self.shared = _shared_draw(env, self.files, total, skips=self._is_set_aside) if config.lease_dir else None
        if self.shared and self.files:
            self.shared.on_end = lambda is_over: setattr(self.source, "drawn_out", is_over)
            self.sink.may_store = self.files.may_write = self.shared.may_store
        self.source = self._make_source(ends=mode == "process")
        self.pool = RolloutPool(
            self.source,
            env.handle_env,
            may_start=self.sink.may_start,
            pause_s=lambda: self.sink.fruitless.pause_s,
            failures=self.failures,
            health=self.health,
            tasks=env.workers,
            running_items=env.running_items,
            settled=self._settled,
        )
        self.concurrency = (
            ConcurrencyLimit(env.trainer_link.first_worker_count(), self.pool.times)
            if config.max_num_workers == "auto"
            else None
        )
        self.progress = Progress(
            path=where.progress_path if where else progress_path(config),
            env=label,
            mode=mode,
            limits=self.sink.limits,
            totals=self.sink.totals,
            failures=self.failures,
            health=self.health,
        )
        self.engines = EngineWatch(env, self.progress, self.concurrency, self._in_engine)
        self.reports = Reports(env.write_html, compress=config.compress_rollouts and not (where and where.single))
        self._display = ProgressDisplay(self.progress)
        self._standstill = Standstill(time.monotonic())
        self._gc_threshold = gc.get_threshold()
        self._stop = StopSignals()
        if self.files:
            loop = asyncio.get_running_loop()
            self.files.on_wait = lambda what: self.progress.wait_for("disk", what)
            self.files.on_shard_complete(partial(loop.call_soon_threadsafe, self.reports.add))

    async def supervise(self, work: Coroutine[object, Never, None]) -> RunOutcome:
        """Run `work` to its end with progress, deadlines and signals looked after; always closes the run.

        Raises what `work` raises, and AtroposError when nothing works any more.
        """
        self._stop.catch()
        if self.shared:
            self.shared.leases.start()
        self._display.start()
        self.progress.write()  # set-up may hold the event loop for longer than whoever started us waits for a sign
        main, watch = asyncio.create_task(work), asyncio.create_task(self._watch())
        stop = asyncio.create_task(self._stop.requested.wait())
        try:
            await asyncio.wait({main, watch, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.done():
                (main if main.done() else watch).result()
                self._complain_if_short()
            self.progress.state = "stopped" if stop.done() else "done"
        except BaseException as error:
            self.progress.state, self.progress.last_error = "failed", describe_error(error)
            raise
        finally:
            await self._close([main, watch, stop])
        total, groups = self.progress.limits.groups, self.progress.totals.groups
        remains = self.progress.state == "stopped" and not self.sink.is_full
        return RunOutcome(EXIT_WORK_REMAINS if remains else EXIT_DONE, groups, total)

    def mark_running(self, apply_limit: Callable[[int], None] = lambda limit: None) -> None:
        """Set-up is over, rollouts begin; `apply_limit` as in `EngineWatch.follow`."""
        self.progress.state = "running"
        self.progress.sample()
        self.progress.write()  # before any rollout can hang: who watches must know that set-up is over
        gc.freeze()  # no collection walks through modules and what set-up made
        gc.set_threshold(*RARE_COLLECTIONS)
        self.engines.follow(apply_limit)

    def work_outside(self, item: Item) -> Work:
        """The work of groups that an environment sends by itself, outside of a rollout."""
        key = content_key(item, self._outside)
        while item is None and self.files and key in self.files.ledger.done:
            key = content_key(item, self._outside)  # nothing names it: it is none of those of an earlier process
        return Work(item, key, self._task_of(item))

    def _task_of(self, item: Item) -> str:
        return as_json(str(self._env.item_task(item)))

    def _is_set_aside(self, item: Item) -> bool:
        return self._task_of(item) in self.health.set_aside

    async def report(self) -> None:
        """Make the HTML twins that are still missing."""
        await self.reports.finish(self.files.files.shards().values() if self.files else ())

    def _make_source(self, *, ends: bool) -> ItemSource:
        env, done = self._env, self.files.ledger.done if self.files else set[str]()
        if self.files:
            env.backlog.extend(self.files.ledger.backlog)
        is_recorded, late = self.files is not None, self.failures.failed_before
        indexed = is_recorded and env.has_get_item
        stream = StreamDraw(env.get_next_item, late, is_recorded)
        return ItemSource(
            self.shared or (IndexedDraw(env.get_item, done, late) if indexed else stream),
            is_done=done.__contains__,
            task_of=self._task_of,
            is_set_aside=self.health.set_aside.__contains__,
            backlog=lambda: env.backlog,
            ends=(ends or indexed) and self.shared is None,
            lost=self._settled,
        )

    def _settled(self, item_key: str) -> None:
        """Nothing more happens with an item."""
        if self.journal:
            self.journal.settle(item_key)
        if self.shared:
            self.shared.settled(item_key)

    async def _watch(self) -> None:
        """Everything that happens by the clock; ends only with an error."""
        previous = synced_at = time.monotonic()
        held = HeldLoop(previous)
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            engine_down = self._env.engine_down()
            self.progress.wait_for("engine", engine_down)
            self._note_in_flight()
            self.progress.stand_still(self._standstill.look(_facts(self), now))
            self.engines.raise_checked()
            self.pool.expire(self._env.config.worker_timeout, outage_s=now - previous if engine_down else 0.0)
            if self.progress.state == "running" and (said := held.look(max(0.0, now - slept_at - TICK_S), now)):
                logger.warning("%s", said)
            previous = now
            if self.health.nothing_works:
                raise AtroposError(f"{self.health.summary()}; {self._where_to_look()}")
            if now - synced_at >= SYNC_EVERY_S:
                synced_at = now
                await self._save()

    def _in_engine(self) -> int:
        """Groups that the limit holds in the engine; 0 while that is away, or a disk, or the API: it tells nothing."""
        return 0 if self.progress.state == "parked" else self.pool.rolling

    def _no_items(self) -> str | None:
        """Return a sentence while the environment has had nothing to roll out for some seconds and nothing runs."""
        if self.pool.in_flight or self.source.idle_s < Fruitless.FIRST_WORD_S or self.source.drawn_out:
            return None
        if self.shared:
            return (
                "an item: the other members have all that is left; what one of them has is taken over when it stops, "
                f"or gives no sign of life for {self.shared.leases.timeout_s:g} s (env.lease_timeout)"
            )
        return (
            f"an item: get_next_item has returned None for {self.source.idle_s:.0f} s and nothing runs; it is asked "
            "again ten times a second. If there are no more items, stop this environment"
        )

    def _note_in_flight(self) -> None:
        self.progress.in_flight = self.pool.in_flight
        self.progress.evaluating = self._env.trainer_link.evaluating()
        self.progress.unfinished_answers, self.progress.unfinished_tokens = self.pool.replies
        if self.journal:
            self.progress.reused_responses = self.journal.reused_responses
            self.progress.reused_tokens = self.journal.reused_tokens
        else:
            self.progress.in_flight_tokens = self.progress.unfinished_tokens

    async def _save(self) -> None:
        self._note_in_flight()
        self.progress.rollouts = await self.files.listed() if self.files else []
        self.progress.sample()
        self._display.update()
        await asyncio.to_thread(self.progress.write)
        if self.files:
            await self.files.sync()

    def _complain_if_short(self) -> None:
        """Raise when files are gone, the API took nothing, or every task was set aside before the end; else warn."""
        total, groups = self.progress.limits.groups, self.progress.totals.groups
        if self.files and (gone := self.files.missing()):
            raise AtroposError(
                f"{len(gone)} rollout files of this run were removed or moved while it ran ({gone[0]} first): put them "
                "back, or give the same command again, which does their items again"
            )
        self.sink.require_delivery()
        if self.sink.is_full:
            return
        if self.shared and not self.health.all_set_aside:
            return  # the others have the rest
        if self.source.is_exhausted and self.health.all_set_aside:
            raise AtroposError(f"{self.health.summary()}; {groups} groups are done; {self._where_to_look()}")
        if self.source.is_exhausted and not groups:
            raise AtroposError(self._why_none())
        if total is not None:
            logger.warning(
                "the items are used up: groups=%d asked=%d; the same command with more items adds the rest",
                groups,
                total,
            )

    def _why_none(self) -> str:
        """Return why the items are used up without a group of this start."""
        reasons = self.sink.fruitless.reasons.most_common()
        if self.failures.last:
            return f"no item gave a group; the last failure: {self.failures.last['error']}; {self._where_to_look()}"
        if reasons:
            why = ", ".join(f"{reason}: {count}" for reason, count in reasons)
            return f"the items are used up, and none gave a usable group ({why}); look at what was dropped"
        if self.files and (done := len(self.files.ledger.done)):
            return (
                "the items are used up, and none gave a usable group in earlier starts, which rejected "
                f"{done} items; look at what was dropped, or give --fresh"
            )
        hook = "get_item(0)" if self._env.has_get_item else "get_next_item()"
        return f"{self._env.label} has no items: {hook} returned None; look at what setup() loads and makes"

    def _where_to_look(self) -> str:
        return f"tracebacks are in {self.failures.path}" if self.failures.path else "see the log above"

    async def _close(self, tasks: Sequence[asyncio.Task[object]]) -> None:
        tasks = [*tasks, *self.engines.tasks]
        for task in tasks:
            task.cancel()
        self._note_in_flight()
        cancelled = await self.pool.close(STOP_TIMEOUT_S)
        await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        if cancelled:
            logger.info("unfinished rollouts given up: %d", cancelled)
        self._stop.release()
        gc.set_threshold(*self._gc_threshold)
        gc.unfreeze()
        if self.journal:
            self.journal.close()
        dropped: DiskError | None = None
        if self.files:
            try:
                self.files.close()
            except DiskError as error:
                dropped = error
                self.progress.state, self.progress.last_error = "failed", describe_error(error)
            if self.shared:
                self.shared.leases.close()  # what is not done is for the others
            self.progress.rollouts = list(self.files.files.shards().values())
            self.progress.html = [twin for path in self.progress.rollouts if (twin := html_twin(path)).exists()]
        self.progress.in_flight = 0
        self.progress.sample()
        self.progress.write()
        self._display.stop()
        if dropped is not None:
            raise dropped


def _facts(run: Run) -> Facts:
    """Return what a standstill is told by."""
    progress = run.progress
    engines, dropped, fruitless = progress.engines, progress.dropped, run.sink.fruitless
    is_set_up = progress.state in ("running", "parked")
    is_serving = is_set_up and progress.mode == "serve"
    return Facts(
        is_set_up=is_set_up,
        is_told=progress.is_parked,
        engine_down=run._env.engine_down(),
        patience_s=run._env.outage_timeout_s(),
        held_back=run._env.trainer_link.held_back() if is_serving else None,
        not_taken=run._env.trainer_link.not_taken() if is_serving else None,
        no_items=run._no_items(),
        in_flight=progress.in_flight,
        answers=progress.unfinished_answers,
        tokens=progress.unfinished_tokens,
        requests=engines.running + engines.queued if engines else None,
        engine_tokens_s=engines.tokens_s if engines else None,
        stored=progress.totals.groups,
        dropped=fruitless.items,
        fruitless=fruitless.sentence(),
        reason=max(fruitless.reasons, key=fruitless.reasons.__getitem__, default=None),
        withheld=dropped.withheld,
        longest=dropped.longest,
        scores=frozenset(dropped.scores),
        max_token_len=run._env.max_token_len,
    )


def _shared_draw(
    env: Environment, files: RolloutFiles | None, total: int | None, *, skips: Callable[[Item], bool]
) -> SharedDraw:
    """ConfigError when this environment or run cannot be shared."""
    config = env.config
    if files is None or total is None or not env.has_get_item:
        raise ConfigError(
            "env.lease_dir shares a run of a fixed number of groups that is written to files, and needs an "
            "environment with get_item(index); set env.total_groups and dump_rollouts, or leave lease_dir out"
        )
    return SharedDraw(
        env.get_item,
        Leases(
            expand_path(config.lease_dir, what="env.lease_dir"),
            config.lease_owner,
            blocks=math.ceil(total / config.lease_items),
            timeout_s=config.lease_timeout,
            rollouts=files.files.folder.absolute(),
        ),
        seats=total,
        seats_per_block=config.lease_items,
        files=files.files,
        done=files.ledger.done,
        skips=skips,
    )
