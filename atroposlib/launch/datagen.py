"""One datagen run: engine, trajectory API, fake trainer and environment, supervised until the rollouts are complete.

    preflight -> api + engine ready -> trainer -> environment ends by itself -> everything stopped -> export

The rollout files are the only truth about what is done; the environment reads them at its start. So the same
command after a crash, a kill or a full disk simply resumes.
"""

import asyncio
import json
import logging
from pathlib import Path

import aiohttp

from atroposlib.errors import LaunchError
from atroposlib.json_lines import read_object
from atroposlib.launch.config import DatagenConfig, ExportConfig
from atroposlib.launch.plan import Model, groups_missing, link_rollouts, make_plan, recorded, rollout_folders
from atroposlib.launch.preflight import SETTINGS_FILE, data_settings, preflight
from atroposlib.launch.services import OnProgress, Stopped, Supervisor, describe_exit, log_tail
from atroposlib.lock_files import end_leftovers, run_lock
from atroposlib.paths import writable_dir, write_text_atomic
from atroposlib.rollouts.stop import EXIT_WORK_REMAINS
from atroposlib.status.page import write_last_page
from atroposlib.status.runs import PROGRESS_FILE, RunRecord, RunStatus, read_status

logger = logging.getLogger(__name__)


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
                asyncio.run(_to_the_end(config, record, on_progress, model))
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


async def _to_the_end(config: DatagenConfig, record: RunRecord, on_progress: OnProgress, model: Model) -> None:
    """Services up in order; the environment's end is the end.

    LaunchError: the environment failed, or a service did so for good.
    """
    record.starts += 1
    async with (
        aiohttp.ClientSession() as session,
        Supervisor(config.work_dir, record, config.restarts, on_progress) as services,
    ):
        plan = make_plan(config, model, session)
        engines = [services.start(engine) for engine in plan.engines]
        await services.until(services.start(plan.api).ready.wait())
        if engines:  # those that come later are used as soon as they answer; a slow node holds nobody up
            await services.until(*(engine.ready.wait() for engine in engines))
        services.start(plan.trainer)
        environment = services.start(plan.environment)
        while (ended := await services.until()) is None or ended[0] is not environment:
            pass
        if ended[1] != 0:
            raise LaunchError(_environment_failed(plan.environment.log, ended[1]))
    services.raise_if_stopped()  # while they stopped: the next start has only the export left


def _environment_failed(log: Path, code: int) -> str:
    if code == EXIT_WORK_REMAINS:
        return f"the environment was stopped from outside with work left; the same command continues (log: {log})"
    lines = [line for line in log_tail(log, 20).splitlines() if line.strip()]
    return f"the environment ended with {describe_exit(code)}: {lines[-1] if lines else 'no output'} (log: {log})"


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
    from atroposlib.data.policy import UniqueStep
    from atroposlib.data.sft import SftOptions, export_sft, simple_policy

    policy = simple_policy(above=entry.above_score, top_n=entry.top_n_per_problem, target=entry.rows)
    if entry.unique:
        policy.steps.insert(1, UniqueStep(step="unique", per="problem"))  # behind the score
    options = SftOptions(format=entry.format, tokenizer=model.tokenizer, overwrite=True, by_item=True)
    output = Path(config.run_dir, entry.path)
    report = export_sft(rollout_folders(config), output, policy, options)
    if entry.rows and report.records < entry.rows:
        logger.warning("%s: %d rows were asked for, only %d are there", output, entry.rows, report.records)
    kept = ", ".join(f"{step.kept} after {step.step}" for step in report.steps)
    counts = f"records={report.records} copies={report.copies} responses={report.responses}"
    logger.info("dataset written: path=%s %s (%s)", output, counts, kept)
    return output
