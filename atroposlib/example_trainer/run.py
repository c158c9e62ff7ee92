"""`atropos-grpo-run`: engine, trajectory API, environment and trainer in one supervised command.

    atropos-grpo-run --config configs/trainer/smoke.yaml

The trainer's end is the end of the run, and its exit code is the command's. Every part keeps its state in `run_dir`
(queue, rollouts, checkpoints), so the same command after a crash, a kill or the end of a SLURM allocation resumes.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from atroposlib.errors import AtroposError, LaunchError
from atroposlib.example_trainer.config import RunConfig
from atroposlib.example_trainer.recipe import build, parser_of, require_torch
from atroposlib.example_trainer.run_plan import TRAINER_GRACE_S, RunPlan, make_plan
from atroposlib.launch.config import RestartConfig
from atroposlib.launch.services import Service, Supervised, describe_exit
from atroposlib.lock_files import end_leftovers, run_lock
from atroposlib.paths import writable_dir
from atroposlib.rollouts.stop import EXIT_WORK_REMAINS, STOP_SIGNALS
from atroposlib.status.page import StatusPage, write_last_page
from atroposlib.status.runs import RunRecord, read_status
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
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
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
        end_leftovers([{**service, "grace_s": _grace_s(service["name"])} for service in record.services], record.node)
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
    running = _Running(RestartConfig(limit=config.restart_limit))  # pyright: ignore[reportCallIssue]
    async with aiohttp.ClientSession() as session:
        plan = make_plan(config, run_dir, session)
        loop = asyncio.get_running_loop()
        for sign in STOP_SIGNALS:
            loop.add_signal_handler(sign, running.stop_requested.set)
        recording = asyncio.create_task(_record(running, run_dir, record))
        try:
            return await running.until_trained(plan)
        finally:
            await running.stop_all()
            recording.cancel()


async def _record(running: "_Running", run_dir: Path, record: RunRecord) -> None:
    """Keep on disk what runs and how far it is, for people and for the next start; log a line a step.

    A disk that fails must not end the run; it is tried again.
    """
    page, step = StatusPage(), -1
    while True:
        await asyncio.sleep(0.5)
        record.elapsed_s += 0.5
        record.services = [service.as_record() for service in running.tasks.values()]
        with contextlib.suppress(OSError, LaunchError):
            record.save(run_dir, "running")
            page.update(lambda: read_status(run_dir))
            training = read_training(run_dir / "metrics", record.steps, only_last=True)
            if training.points and training.step != step:
                step = training.step
                logger.info("%s", training.line())


class _Running:
    """The services that are up."""

    def __init__(self, restarts: RestartConfig) -> None:
        self.stop_requested = asyncio.Event()
        self._restarts = restarts
        self.tasks: dict[asyncio.Task[int], Supervised] = {}

    async def until_trained(self, plan: RunPlan) -> int:
        """Start everything in order; the trainer's exit code, or 75 when a signal came first."""
        for service in plan.servers:
            started = self._start(service)
            await self._first_of(asyncio.create_task(started.ready.wait()))
            if self.stop_requested.is_set():
                return EXIT_WORK_REMAINS
        trainer = self._start(plan.trainer)
        ended = await self._first_of(asyncio.create_task(trainer.ready.wait()))
        if ended is None and not self.stop_requested.is_set():
            self._start(plan.environment)
        while not self.stop_requested.is_set():
            ended = await self._first_of()
            if ended is None:
                continue
            code = self._take_code(ended)
            if ended is trainer and code in (0, EXIT_WORK_REMAINS):
                return code
            if ended is trainer:
                logger.error("the trainer failed; the end of %s:\n%s", ended.service.log, ended.tail(5))
                return code
            if code != 0:
                raise LaunchError(
                    f"{ended.service.name} ended: {describe_exit(code)}; the end of {ended.service.log}:\n"
                    f"{ended.tail(20)}"
                )
        await trainer.stop(TRAINER_GRACE_S)
        return EXIT_WORK_REMAINS

    async def stop_all(self) -> None:
        """End what is still running, the last started first."""
        for task, service in reversed(self.tasks.items()):
            await service.stop(_grace_s(service.service.name))
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _start(self, service: Service) -> Supervised:
        supervised = Supervised(service, self._restarts)
        self.tasks[asyncio.create_task(supervised.run())] = supervised
        return supervised

    async def _first_of(self, *others: "asyncio.Task[bool]") -> Supervised | None:
        """Wait for the end of a service, a stop signal or one of `others`; the service, if it was one.

        Raises:
            LaunchError: a service failed for good.
        """
        stop = asyncio.create_task(self.stop_requested.wait())
        done, _ = await asyncio.wait({stop, *others, *self.tasks}, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (stop, *others):
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
        for task in done & set(self.tasks):
            task.result()
            return self.tasks[task]
        return None

    def _take_code(self, service: Supervised) -> int:
        """Exit code of a service that has ended; it is forgotten."""
        task = next(task for task, other in self.tasks.items() if other is service)
        del self.tasks[task]
        return task.result()


def _grace_s(name: str) -> float:
    return TRAINER_GRACE_S if name == "trainer" else 10.0


if __name__ == "__main__":
    main()
