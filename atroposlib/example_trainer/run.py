"""`atropos-grpo-run`: engine, trajectory API, environment and trainer in one supervised command.

    atropos-grpo-run --config configs/trainer/smoke.yaml

The trainer's end is the end of the run, and its exit code is the command's. Every part keeps its state in `run_dir`
(queue, rollouts, checkpoints), so the same command after a crash, a kill or the end of a SLURM allocation resumes.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from atroposlib import calm_log
from atroposlib.errors import AtroposError, LaunchError
from atroposlib.example_trainer.config import RunConfig
from atroposlib.example_trainer.recipe import build, parser_of, require_torch
from atroposlib.example_trainer.run_plan import RunPlan, make_plan
from atroposlib.launch.config import RestartConfig
from atroposlib.launch.services import Stopped, Supervisor, describe_exit
from atroposlib.lock_files import end_leftovers, run_lock
from atroposlib.paths import writable_dir
from atroposlib.rollouts.stop import EXIT_WORK_REMAINS
from atroposlib.status.page import write_last_page
from atroposlib.status.runs import RunRecord, RunStatus
from atroposlib.status.training import read_training
from atroposlib.system_limits import told_limits

logger = logging.getLogger(__name__)

_END = {
    0: "training finished; weights in {folder}/checkpoints/final, metrics in {folder}/metrics/metrics.jsonl",
    EXIT_WORK_REMAINS: "stopped; the same command resumes",
}
_EXAMPLES = """\
examples:
  atropos-grpo-run --config configs/trainer/smoke.yaml    # two CPU cores, 20 steps
  atropos-grpo-run --config configs/trainer/grpo.yaml --model-name Qwen/Qwen3-0.6B --lr 2e-6
  ATROPOS_ENGINE_GPUS=0 ATROPOS_TRAINER_GPUS=1,2 atropos-grpo-run --config configs/trainer/countdown.yaml
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command. Exit codes: the trainer's (0, 1, 75), 1 for any other failure, 2 for wrong usage."""
    calm_log.begin(logging.INFO)
    try:
        parser = parser_of(RunConfig, "Train with engine, API, environment and trainer in one command.", _EXAMPLES)
        args = parser.parse_args(argv)
        config = build(RunConfig, vars(args), os.environ)
        with told_limits():
            code = run(config)
    except AtroposError as error:
        print(f"atropos-grpo-run: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(
        _END.get(code, "training ended with exit code {code}; read {folder}/logs").format(
            code=code, folder=config.run_dir
        )
    )
    raise SystemExit(code)


def run(config: RunConfig) -> int:
    """Run to the end of the training or to a stop signal; the trainer's exit code.

    Raises:
        ConfigError: the trainer's packages are not installed, or the recipe names what is not there.
        LaunchError: the folder is in use, a service failed for good, or the environment failed.
    """
    require_torch()
    run_dir = writable_dir(config.run_dir, what="run_dir").absolute()
    with run_lock(run_dir):
        facts = {"name": run_dir.name, "problems": 0, "responses": config.num_generations, "kind": "train"}
        record = RunRecord.load(run_dir, **facts, steps=config.training_steps)
        end_leftovers(record.services, record.node)
        record.forget_services()
        record.begin(logs=run_dir / "logs")
        record.starts += 1
        try:
            code = asyncio.run(_supervise(config, run_dir, record))
            record.end(run_dir, {0: "done", EXIT_WORK_REMAINS: "stopped"}.get(code, "failed"))
        except BaseException as error:
            record.end(run_dir, "failed", str(error) or type(error).__name__)
            raise
        finally:
            write_last_page(run_dir)
        return code


async def _supervise(config: RunConfig, run_dir: Path, record: RunRecord) -> int:
    step = -1

    def log_step(_: RunStatus) -> None:
        nonlocal step
        training = read_training(run_dir / "metrics", record.steps, only_last=True)
        if training.points and training.step != step:
            step = training.step
            logger.info("%s", training.line())

    restarts = RestartConfig(limit=config.restart_limit)  # pyright: ignore[reportCallIssue]
    async with aiohttp.ClientSession() as session, Supervisor(run_dir, record, restarts, log_step) as services:
        return await until_trained(make_plan(config, run_dir, session), services)


async def until_trained(plan: RunPlan, services: Supervisor) -> int:
    """Start everything in order; the trainer's exit code, or 75 when a signal came first."""
    try:
        for service in plan.servers:
            await services.until(services.start(service).ready.wait())
        trainer = services.start(plan.trainer)
        ended = await services.until(trainer.ready.wait())
        if ended is None:
            services.start(plan.environment)
        while True:
            service, code = ended or await services.until() or (None, 0)
            ended = None
            if service is trainer:
                if code not in (0, EXIT_WORK_REMAINS):
                    logger.error("the trainer failed; the end of %s:\n%s", trainer.service.log, trainer.tail(5))
                return code
            if service is not None and code != 0:
                raise LaunchError(
                    f"{service.service.name} ended: {describe_exit(code)}; the end of {service.service.log}:\n"
                    f"{service.tail(20)}"
                )
    except Stopped:
        return EXIT_WORK_REMAINS


if __name__ == "__main__":
    main()
