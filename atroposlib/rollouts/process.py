"""`process`: roll out exactly `total_steps` groups into a rollout file; no trajectory API, no trainer."""

import asyncio
import logging

from atroposlib.rollouts.run import Environment, Outcome, Run

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0


async def run_process(env: Environment) -> Outcome:
    """Run until the asked number of groups is on disk (negative: until the items end).

    The same call after any interruption goes on.

    Raises:
        LaunchError: another process writes this run.
        AtroposError: nothing works any more.
    """
    wanted = env.config.total_steps
    run = Run(env, mode="process", total=None if wanted < 0 else wanted, files=env.run_files(), sender=None)
    env.attach(run)
    if run.sink.is_full:
        logger.info("already complete: groups=%d", run.sink.totals.groups)
    return await run.supervise(_work(env, run))


async def _work(env: Environment, run: Run) -> None:
    if not run.sink.is_full:
        await run.check_engines()
        await env.setup()
        await env.setup_wandb()
        run.mark_running(run.pool.pace)
        run.pool.pace(env.worker_count())
        logging_task = asyncio.create_task(_log_regularly(env))
        try:
            await run.pool.run(lambda: run.sink.is_full)
        finally:
            logging_task.cancel()
        await env.log_now()
    await run.report()


async def _log_regularly(env: Environment) -> None:
    """Metrics now and then, when there is something new."""
    logged = env.curr_step
    while True:
        await asyncio.sleep(LOG_EVERY_S)
        if env.curr_step != logged:
            logged = env.curr_step
            await env.log_now()
