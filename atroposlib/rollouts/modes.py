"""The two ways to run an environment.

`process` rolls out exactly `total_steps` groups into a rollout file. `serve` rolls out groups for a trainer through the
trajectory API, at the pace the trainer needs them; it ends when the trainer's steps are served, when `total_groups`
groups are stored and acknowledged, or when the items end.
"""

import asyncio
import logging
import time

from atroposlib.backoff import poll_pause_s
from atroposlib.rollouts.failures import logged
from atroposlib.rollouts.locations import RunFiles
from atroposlib.rollouts.run import Environment, Run, RunOutcome
from atroposlib.rollouts.source import of_hook

logger = logging.getLogger(__name__)

STATUS_EVERY_S = 0.1
API_SLOW_S = 3.0
GOODBYE_S = 2.0


async def run_serve(env: Environment) -> RunOutcome:
    """Run until done; the same call after any interruption resumes.

    Raises:
        LaunchError: another process writes this run. ApiError: the API refuses this environment.
        AtroposError: nothing works any more.
    """
    api, files = env.trainer_link.api, RunFiles.of(env.config, env.label, must_write=False)
    run = Run(env, mode="serve", total=env.config.total_groups, files=files, sender=api)
    env.attach(run)
    try:
        return await run.supervise(_serve(env, run))
    finally:
        await api.disconnect(deadline_s=GOODBYE_S)  # so that after a stop no trainer waits for this environment
        await api.close()


async def _serve(env: Environment, run: Run) -> None:
    if run.sink.is_full and not run.sink.unsent:
        logger.info("already complete: groups=%d", run.sink.totals.groups)
        await run.report()
        return
    await run.engines.check()
    await of_hook(env.setup(), "setup")
    run.progress.wait_for(
        "api",
        f"a trainer at the trajectory API {env.config.rollout_server_url}: none is registered, or the API (run-api) "
        "does not answer; rollouts begin when one is",
    )
    await env.setup_wandb()
    await env.register_env()
    await env.get_server_info()
    run.progress.wait_for("api", None)
    await _resend(env, run)
    run.mark_running()
    await _roll_out(env, run)
    if not env.trainer_link.is_served():
        await _resend(env, run)  # what an author's code or a deadline ended in the middle of its sending
    if env.items_sent_this_step:
        await _log(env)  # of what the trainer has yet to take
    await env.trainer_link.api.disconnect()
    await run.report()


async def _resend(env: Environment, run: Run) -> None:
    if run.sink.unsent:
        where = f"the trajectory API {env.config.rollout_server_url}"
        run.progress.wait_for("api", f"{where}, to send it what it does not have")
        logger.info("sent again what was not acknowledged: groups=%d", await run.sink.resend())
        run.progress.wait_for("api", None)


async def _roll_out(env: Environment, run: Run) -> None:
    rolling = asyncio.create_task(run.pool.run(lambda: run.sink.is_full))
    pacing = asyncio.create_task(_pace(env, run))
    try:
        await asyncio.wait({rolling, pacing}, return_when=asyncio.FIRST_COMPLETED)
        (rolling if rolling.done() else pacing).result()
    finally:
        rolling.cancel()
        pacing.cancel()
        await asyncio.wait({rolling, pacing})


async def _pace(env: Environment, run: Run) -> None:
    """Follow the trainer until it has all it wants; closely at first where no rollout may run, as the engine idles."""
    busy_at = now = time.monotonic()
    while True:
        await _status(env, run)
        await env.env_step_checks()
        if env.trainer_link.is_served():
            return
        await env.add_train_workers()
        before, now = now, time.monotonic()
        env.mainloop_timings.append(now - before)
        busy_at = now if run.pool.in_flight else busy_at
        await asyncio.sleep(STATUS_EVERY_S if run.pool.in_flight else poll_pause_s(now - busy_at, STATUS_EVERY_S))


async def _status(env: Environment, run: Run) -> None:
    """Ask for the status; say so when the API takes long, as it does while it is down."""
    asking = asyncio.create_task(env.get_status())
    try:
        await asyncio.wait({asking}, timeout=API_SLOW_S)
        if not asking.done():
            where = f"the trajectory API {env.config.rollout_server_url}"
            run.progress.wait_for(
                "api", f"{where}: it does not answer; what is rolled out is kept and sent when it does"
            )
        await asking
        run.progress.wait_for("api", None)
    finally:
        asking.cancel()


LOG_EVERY_S = 10.0


async def run_process(env: Environment) -> RunOutcome:
    """Run until the asked number of groups is on disk (negative: until the items end); raises as `run_serve`."""
    wanted, files = env.config.total_steps, RunFiles.of(env.config, env.label, must_write=True)
    run = Run(env, mode="process", total=None if wanted < 0 else wanted, files=files, sender=None)
    env.attach(run)
    if run.sink.is_full:
        logger.info("already complete: groups=%d", run.sink.totals.groups)
    return await run.supervise(_roll_out_all(env, run))


async def _roll_out_all(env: Environment, run: Run) -> None:
    if not run.sink.is_full:
        await run.engines.check()
        await of_hook(env.setup(), "setup")
        await env.setup_wandb()
        run.mark_running(run.pool.pace)
        run.pool.pace(env.trainer_link.worker_count())
        logging_task = asyncio.create_task(_log_regularly(env))
        try:
            await run.pool.run(lambda: run.sink.is_full)
        finally:
            logging_task.cancel()
        await _log(env)
    await run.report()


async def _log_regularly(env: Environment) -> None:
    """Metrics now and then, when there is something new."""
    logged_step = env.curr_step
    while True:
        await asyncio.sleep(LOG_EVERY_S)
        if env.curr_step != logged_step:
            logged_step = env.curr_step
            await _log(env)


async def _log(env: Environment) -> None:
    with logged("metrics not logged"):
        await env.wandb_log({})
