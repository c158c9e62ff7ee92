"""One datagen run: engine, trajectory API, fake trainer and environment, supervised until the rollouts are complete.

    preflight -> api + engine ready -> trainer -> environment ends by itself -> everything stopped -> export

The rollout files are the only truth about what is done; the environment reads them at its start. So the same
command after a crash, a kill or a full disk simply resumes.
"""

import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import aiohttp

from atroposlib.errors import LaunchError
from atroposlib.json_lines import read_object
from atroposlib.launch.config import DatagenConfig, ExportConfig
from atroposlib.launch.plan import Model, Plan, groups_missing, link_rollouts, make_plan, recorded, rollout_folders
from atroposlib.launch.preflight import SETTINGS_FILE, data_settings, preflight
from atroposlib.launch.services import Service, Supervised, describe_exit, log_tail
from atroposlib.lock_files import end_leftovers, run_lock
from atroposlib.paths import writable_dir, write_text_atomic
from atroposlib.rollouts.stop import EXIT_WORK_REMAINS, STOP_SIGNALS
from atroposlib.status.page import StatusPage, write_last_page
from atroposlib.status.runs import PROGRESS_FILE, RunRecord, RunStatus, read_status

logger = logging.getLogger(__name__)

OnProgress = Callable[[RunStatus], None]


class Stopped(LaunchError):
    """The run was asked to stop; what is finished is on disk."""


def run_datagen(config: DatagenConfig, on_progress: OnProgress) -> RunStatus:
    """Bring the run in `config.run_dir` to its end, from wherever it stands.

    Args:
        on_progress: called about once a second with the status.

    Returns:
        The final status, its `outputs` naming every file.

    Raises:
        LaunchError: preflight failed, the folder is in use, or a service failed for good.
        Stopped: SIGINT, SIGTERM or SIGUSR1 came; the same command continues.
    """
    run_dir = writable_dir(config.work_dir, what="run_dir")
    with run_lock(run_dir):
        record = RunRecord.load(run_dir, name=config.name, problems=config.problems, responses=config.responses)
        end_leftovers(record.services, record.node)  # they may still hold the ports that preflight looks at
        record.forget_services()
        model = preflight(config)
        write_text_atomic(Path(config.run_dir) / SETTINGS_FILE, json.dumps(data_settings(config), indent=1))
        record.begin(config.logs)
        try:
            if not _is_complete(config):
                asyncio.run(_Run(config, record, on_progress).to_the_end(model))
                _tell_if_short(config)
            link_rollouts(config)
            if config.share.member and (missing := groups_missing(config)):
                logger.info("this member is done; others have the last problems: missing=%d", missing)
            else:
                record.save(run_dir, "exporting")
                record.exports = [str(path) for path in export_all(config, model)]
            record.save(run_dir, "done")
        except BaseException as error:
            stopped = isinstance(error, Stopped)
            said = None if stopped else str(error) or type(error).__name__
            record.end(run_dir, "stopped" if stopped else "failed", said)
            raise
        finally:
            write_last_page(run_dir)
        return read_status(run_dir)


class _Run:
    """The asynchronous middle of a run, while services live."""

    def __init__(self, config: DatagenConfig, record: RunRecord, on_progress: OnProgress) -> None:
        self._config = config
        self._record = record
        self._on_progress = on_progress
        self._run_dir = config.work_dir
        self._page = StatusPage()
        self._services: list[Supervised] = []

    async def to_the_end(self, model: Model) -> None:
        """Start the services, wait for the environment, stop the services whatever happened."""
        self._record.starts += 1
        async with aiohttp.ClientSession() as session:
            plan = make_plan(self._config, model, session)
            with _signals(asyncio.get_running_loop()) as stop:
                ticker = asyncio.create_task(self._tick())
                try:
                    await self._until_stopped(self._work(plan), stop)
                finally:
                    await self._stop()
                    ticker.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await ticker
                    self._publish()

    async def _until_stopped(self, work: Coroutine[object, object, None], stop: "asyncio.Future[str]") -> None:
        """Run `work`; a stop signal ends it with Stopped."""
        task = asyncio.create_task(work)
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise Stopped(f"stopped by {stop.result()}; the same command continues where it stands")
        task.result()

    async def _work(self, plan: Plan) -> None:
        """Services up in order; the environment's end is the end.

        Raises:
            LaunchError: the environment failed, or a service did so for good.
        """
        try:
            code = await self._until_environment_ends(plan)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first failure; it cancelled the others
        if code != 0:
            raise LaunchError(self._environment_failed(code))

    async def _until_environment_ends(self, plan: Plan) -> int:
        async with asyncio.TaskGroup() as group:
            running = []
            for service in (*plan.engines, plan.api):
                running.append(group.create_task(self._supervise(service).run()))
            await self._api_and_an_engine_ready()
            running.append(group.create_task(self._supervise(plan.trainer).run()))
            code = await self._supervise(plan.environment).run()
            for task in running:
                task.cancel()
        return code

    def _supervise(self, service: Service) -> Supervised:
        supervised = Supervised(service, self._config.restarts)
        self._services.append(supervised)
        return supervised

    async def _api_and_an_engine_ready(self) -> None:
        """Engines that come later are used as soon as they answer; a slow node holds nobody up."""
        *engines, api = [asyncio.create_task(service.ready.wait()) for service in self._services]
        try:
            await api
            if engines:
                await asyncio.wait(engines, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (*engines, api):
                waiting.cancel()

    def _environment_failed(self, code: int) -> str:
        log = self._services[-1].service.log
        if code == EXIT_WORK_REMAINS:
            return f"the environment was stopped from outside with work left; the same command continues (log: {log})"
        lines = [line for line in log_tail(log, 20).splitlines() if line.strip()]
        return f"the environment ended with {describe_exit(code)}: {lines[-1] if lines else 'no output'} (log: {log})"

    async def _stop(self) -> None:
        """The environment first, as the others take what it still sends; these together."""
        *others, last = self._services or [None]
        if last is not None:
            await last.stop()
            await asyncio.gather(*(service.stop() for service in others if service))

    async def _tick(self) -> None:
        """Once a second: add up the time, write run.json, report."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(1)
            now = time.monotonic()
            self._record.elapsed_s += now - last
            last = now
            self._publish()

    def _publish(self) -> None:
        self._record.services = [service.as_record() for service in self._services]
        with contextlib.suppress(OSError, LaunchError):  # a disk that fails must not end the run; it is tried again
            self._record.save(self._run_dir, "running")
            status = read_status(self._run_dir)
            self._page.update(lambda: status)
            self._on_progress(status)


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop) -> Iterator["asyncio.Future[str]"]:
    """The first stop signal, as a future of its name; further ones change nothing."""
    stop: asyncio.Future[str] = loop.create_future()

    def note(sign: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(sign.name)

    for sign in STOP_SIGNALS:
        loop.add_signal_handler(sign, note, sign)
    try:
        yield stop
    finally:
        for sign in STOP_SIGNALS:
            loop.remove_signal_handler(sign)


def _is_complete(config: DatagenConfig) -> bool:
    """True when the environment has said that every problem is on disk, and it is, however the last start ended."""
    if config.share.member:
        return groups_missing(config) == 0
    said = read_object(Path(config.run_dir) / PROGRESS_FILE) or {}
    is_done = said.get("state") == "done" and said.get("groups_done", 0) >= config.problems
    return is_done and sum(ledger.totals.groups for ledger in recorded(config)) >= config.problems


def _tell_if_short(config: DatagenConfig) -> None:
    """The environment ended by itself; it may have had fewer items than were asked for."""
    status = read_status(config.work_dir)
    if not config.share.member and status.groups_done < config.problems and status.limit_share < 1:
        logger.warning("the items are used up: %d of %d problems are recorded", status.groups_done, config.problems)


def export_all(config: DatagenConfig, model: Model) -> list[Path]:
    """Write every export again from all rollouts of the run; the paths written.

    Raises:
        LaunchError: a dataset would be empty, said once the others are written; the rollouts are still there.
    """
    from atroposlib.data.report import NothingKept

    written: list[Path] = []
    empty: list[str] = []
    for entry in config.export:
        try:
            written.append(_export(entry, config, model))
        except NothingKept as error:
            above = f"above_score is {entry.above_score:g}"
            empty.append(f"{entry.path} would be empty: {error}; {above}: lower it and run the same command again")
    if empty:
        raise LaunchError("the run is complete, but " + "; ".join(empty))
    return written


def _export(entry: ExportConfig, config: DatagenConfig, model: Model) -> Path:
    from atroposlib.data.policy import TargetStep, UniqueStep
    from atroposlib.data.sft import SftOptions, export_sft, simple_policy

    policy = simple_policy(above=entry.above_score, top_n=entry.top_n_per_problem)
    if entry.unique:
        score, *others = policy.steps
        policy = policy.model_copy(update={"steps": [score, UniqueStep(step="unique", per="problem"), *others]})
    if entry.rows:
        exact = TargetStep(step="target", count=entry.rows, allow_fewer=True)
        policy = policy.model_copy(update={"steps": [*policy.steps, exact]})
    options = SftOptions(format=entry.format, tokenizer=model.tokenizer, overwrite=True, by_item=True)
    output = Path(config.run_dir, entry.path)
    report = export_sft(rollout_folders(config), output, policy, options)
    if entry.rows and report.records < entry.rows:
        logger.warning("%s: %d rows were asked for, only %d are there", output, entry.rows, report.records)
    kept = ", ".join(f"{step.kept} after {step.step}" for step in report.steps)
    counts = f"records={report.records} copies={report.copies} responses={report.responses}"
    logger.info("dataset written: path=%s %s (%s)", output, counts, kept)
    return output
