"""`process`: roll out exactly `total_steps` groups into a rollout file; no trajectory API, no trainer."""

import logging

from atroposlib.rollouts.environment import Environment
from atroposlib.rollouts.run import Outcome, Run

logger = logging.getLogger(__name__)


async def run_process(env: Environment) -> Outcome:
    """Run until the asked number of groups is on disk; the same call after any interruption goes on.

    Raises:
        LaunchError: another process writes this run.
        AtroposError: nothing works any more.
    """
    run = Run(env, mode="process", total=env.config.total_steps, files=env.run_files(), sender=None)
    env.attach(run)
    if run.sink.is_full:
        logger.info("already complete: groups=%d", run.sink.totals.groups)
    return await run.supervise(_work(env, run))


async def _work(env: Environment, run: Run) -> None:
    if not run.sink.is_full:
        await env.setup()
        await env.setup_wandb()
        run.mark_running(run.pool.pace)
        run.pool.pace(env.worker_count())
        await run.pool.run(lambda: run.sink.is_full)
        await env.wandb_log()
    await run.report()
