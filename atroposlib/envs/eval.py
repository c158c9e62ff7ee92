"""Evaluations outside an environment: a class per benchmark, run against any engine, results in files.

    class Arithmetic(EvalBase):
        def setup_data(self): ...
        async def run_item(self, server, data_item): ...

    asyncio.run(eval_runner(Arithmetic(eval_dir="results")))

Result files are the same as an environment's: `metrics.json` and `samples.jsonl`.

Here is the evaluate mode of environments, too. Both continue after a kill: finished responses are kept with the results
until the evaluation has ended well.

    evaluate.journal.1, ...    responses so far, see `atroposlib.rollouts.journal`
    evaluate.engines.json      model and weights that gave them
    evaluate.lock              held by the process that evaluates
    evaluate_progress.json     see `atroposlib.rollouts.evaluation`

The evaluation itself runs again from its beginning, with the scores that this makes; only what it asks the engine is
answered from the journal where the answer is known. A request is known by its model, prompt and sampling parameters.
Where the engines say that they serve another model or other weights now, nothing that was kept is used.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

import orjson

from atroposlib.envs.hooks import EnvHooks
from atroposlib.envs.server_handling.one_by_one import OneByOne
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager, missing_engine, requests_out
from atroposlib.errors import EnvironmentFault
from atroposlib.json_lines import as_json, one_line, read_object, to_json
from atroposlib.lock_files import take_lock
from atroposlib.paths import expand_path, writable_dir, write_text_atomic
from atroposlib.rollouts.evaluation import (
    PROGRESS_FILE,
    Evaluation,
    current_evaluation,
    evaluate_items,
    shown,
)
from atroposlib.rollouts.journal import ResponseJournal
from atroposlib.rollouts.run import CHECK_S, EXIT_DONE, STOP_TIMEOUT_S
from atroposlib.rollouts.source import Work, current_work, of_hook
from atroposlib.rollouts.stop import EXIT_WORK_REMAINS, StopSignals
from atroposlib.status.training import HISTORY_FILE
from atroposlib.type_definitions import Item, Json, JsonObject
from atroposlib.utils.display import display_metrics_table
from atroposlib.utils.eval_statistics import pass_at_k

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

__all__ = [
    "EvalBase",
    "eval_runner",
    "evaluate_items",
    "evaluate_log",
    "pass_at_k",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
_KEY = "evaluation"
ENGINES_FILE = "evaluate.engines.json"

Outcome = tuple[dict[str, float], Json]
"""Metrics of one item, and a sample for the records."""


def evaluate_log(
    metrics: Mapping[str, float],
    eval_dir: str | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: Mapping[str, object] | None = None,
    samples: Sequence[object] | None = None,
    verbose: bool = True,
) -> None:
    """Write `metrics.json` and, with samples, `samples.jsonl`; both appear whole or not at all.

    An evaluation next to a trainer also adds a line to `history.jsonl`: step, time in seconds since the epoch, metrics.

    Args:
        metrics: name -> value; numpy numbers are fine, NaN becomes null.
        eval_dir: made when missing. None writes nothing, with a warning.
        task_name: of the key `atropos|<task_name>|0` in the results.
        model_name: what was evaluated.
        start_time: seconds since the epoch; None: when the running evaluation began, else `end_time`.
        end_time: seconds since the epoch; None: now.
        generation_parameters: as sent to the engine.
        samples: one JSON value per line.
        verbose: also print the metrics as a table.
    """
    if eval_dir is None:
        logger.warning("evaluation results are not written: no eval_dir is set (env.data_dir_to_save_evals)")
        return
    end = time.time() if end_time is None else end_time
    running = current_evaluation()
    start = start_time if start_time is not None else running.started_at if running else end
    if verbose:
        display_metrics_table(str(task_name), metrics, start, end)
    results = {
        "config_general": {
            "model_name": model_name,
            "total_evaluation_time_seconds": str(end - start),
            "generation_parameters": dict(generation_parameters or {}),
        },
        "results": {f"atropos|{task_name}|0": metrics, "all": metrics},
    }
    folder = expand_path(eval_dir, what="eval_dir")
    folder.mkdir(parents=True, exist_ok=True)
    if samples:
        lines = (one_line(to_json(sample)) for sample in samples)
        _write(folder / "samples.jsonl", b"\n".join(lines) + b"\n")
    _write(folder / "metrics.json", orjson.dumps(as_json(results), option=orjson.OPT_INDENT_2))  # last: all is there
    if running is not None and running.step is not None:
        line = one_line(to_json({"step": running.step, "time": end, "metrics": metrics}))
        with (folder / HISTORY_FILE).open("ab") as history:
            history.write(b"\n" + line + b"\n")  # an earlier line that a kill cut short stays apart


class EvalBase(ABC):
    """One benchmark. Subclasses load items in `setup_data` and score one in `run_item`.

    Keyword arguments become attributes. Known ones: `temperature`, `top_p` and `max_tokens` of the generation,
    `eval_dir` for the results, `verbose` to print a table, `max_concurrent` items at the same time.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = -1
    eval_dir: str | None = None
    verbose: bool = False
    max_concurrent: int = 512

    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **kwargs: object) -> None:
        """Load the items.

        Args:
            pass_at_n: answers that count.
            pass_at_n_samples: answers sampled to estimate it, when more.
            kwargs: attributes to set.
        """
        self.pass_at_n = pass_at_n
        self.pass_at_n_samples = pass_at_n_samples
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.data = self.setup_data()

    @abstractmethod
    def setup_data(self) -> list[Item]:
        """The items."""

    @abstractmethod
    async def run_item(self, server: ServerManager, data_item: Item) -> Outcome:
        """Metrics of one item, each a number to be averaged, and a JSON-shaped sample for the records."""

    @property
    def task_name(self) -> str:
        """`Class@n`, or `Class@n:samples` when more answers are sampled than count."""
        samples = f":{self.pass_at_n_samples}" if self.pass_at_n_samples != self.pass_at_n else ""
        return f"{type(self).__name__}@{self.pass_at_n}{samples}"

    def get_generation_params(self) -> JsonObject:
        """Return what `chat_completion` sends in addition to the messages."""
        return {
            "temperature": self.temperature,
            "n": max(self.pass_at_n, self.pass_at_n_samples),
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
        }

    async def chat_completion(self, server: ServerManager, messages: list[JsonObject]) -> "ChatCompletion":
        """One request with this benchmark's generation parameters."""
        return await server.chat_completion(messages=messages, **self.get_generation_params())

    async def __call__(self, server_manager: ServerManager) -> dict[str, float]:
        """Run every item and write the results; with an `eval_dir`, finished responses outlive a kill.

        A failed item counts in `failed_items` and in no other metric; its traceback is logged.

        Raises:
            EnvironmentFault: every item failed, or there are none.
        """
        start = time.time()
        folder = None if self.eval_dir is None else writable_dir(self.eval_dir, what="eval_dir")
        outcomes = await shown_evaluation(
            lambda: self._run_items(server_manager), server_manager, self.task_name, folder
        )
        done = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        metrics = _averages([item_metrics for item_metrics, _ in done])
        if len(done) < len(outcomes):
            metrics["failed_items"] = float(len(outcomes) - len(done))
        logger.info("evaluation done: task=%s items=%d metrics=%s", self.task_name, len(outcomes), metrics)
        evaluate_log(
            metrics,
            eval_dir=self.eval_dir,
            task_name=self.task_name,
            model_name=server_manager.servers[0].config.model_name,
            start_time=start,
            end_time=time.time(),
            generation_parameters=self.get_generation_params(),
            samples=[sample for _, sample in done],
            verbose=self.verbose,
        )
        return metrics

    async def _run_items(self, server_manager: ServerManager) -> list[Outcome | BaseException]:
        slots = asyncio.Semaphore(self.max_concurrent)

        async def run(item: Item) -> Outcome:
            async with slots:
                return await self.run_item(server_manager, item)

        outcomes = await evaluate_items(map(run, self.data), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            logger.error("item failed: task=%s error=%s", self.task_name, error, exc_info=error)
        if len(errors) == len(outcomes):
            raise EnvironmentFault(
                f"{self.task_name}: all {len(errors)} items failed, so there is nothing to report"
                if errors
                else f"{self.task_name}: setup_data() gave no items; check the data it loads"
            ) from (errors[0] if errors else None)
        return outcomes


async def eval_runner(eval_env: EvalBase, arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Run a benchmark from the command line: `--server-url`, `--model-name`. Prints the metrics as JSON.

    Args:
        eval_env: the benchmark.
        arguments: None: those of this process.
    """
    parser = argparse.ArgumentParser(description=type(eval_env).__doc__)
    parser.add_argument("--server-url", default="http://localhost:8000", help="Address of an OpenAI-style engine.")
    parser.add_argument("--model-name", help="Model to ask for; left out: the server's only one.")
    args = parser.parse_args(arguments)
    model = {"model_name": args.model_name} if args.model_name else {}
    config = APIServerConfig(api_key="none", base_url=args.server_url, health_check=False, **model)
    metrics = await eval_env(ServerManager(configs=[config]))
    print(orjson.dumps(as_json(metrics), option=orjson.OPT_INDENT_2).decode())
    return metrics


def _averages(per_item: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every metric over the items that have it."""
    names = dict.fromkeys(name for metrics in per_item for name in metrics)
    return {name: fmean(metrics[name] for metrics in per_item if name in metrics) for name in names}


def _write(path: Path, content: bytes) -> None:
    write_text_atomic(path, content.decode())
    logger.info("evaluation results written: file=%s", path)


async def run_evaluate(env: EnvHooks, check_engines: Callable[[], Awaitable[object]]) -> int:
    """Evaluate until it is done or a signal asks to stop; the exit code."""
    stop = StopSignals()
    stop.catch()
    evaluating, stopping = (
        asyncio.create_task(_evaluate(env, check_engines)),
        asyncio.create_task(stop.requested.wait()),
    )
    try:
        await asyncio.wait({evaluating, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not evaluating.done():
            return EXIT_WORK_REMAINS
        evaluating.result()
        return EXIT_DONE
    finally:
        evaluating.cancel()
        stopping.cancel()
        await asyncio.wait({evaluating, stopping}, timeout=STOP_TIMEOUT_S)
        stop.release()


async def _evaluate(env: EnvHooks, check_engines: Callable[[], Awaitable[object]]) -> None:
    """`setup` and `evaluate`; with a folder for the results, the same command resumes after a kill."""
    with contextlib.suppress(TimeoutError):  # a busy engine answers late
        async with asyncio.timeout(CHECK_S):
            await check_engines()
    folder = None
    if env.config.data_dir_to_save_evals:
        folder = writable_dir(env.config.data_dir_to_save_evals, what="env.data_dir_to_save_evals")
        if env.settings_text:
            write_text_atomic(folder / "evaluate_config.yaml", env.settings_text)

    async def set_up_and_evaluate() -> None:
        await of_hook(env.setup(), "setup")
        await of_hook(env.evaluate(), "evaluate")

    await shown_evaluation(set_up_and_evaluate, env.server, env.label, folder, fresh=env.fresh)


async def shown_evaluation(
    evaluate: Callable[[], Awaitable[T]],
    server: ServerManager,
    name: str,
    folder: Path | None = None,
    *,
    fresh: bool = False,
) -> T:
    """Evaluate, counted and shown; `folder` gets the progress file, and keeps responses until the end."""
    servers, path = server.servers, folder and folder / PROGRESS_FILE
    evaluation = Evaluation(
        path, name, requests_out=lambda: requests_out(servers), missing=lambda: missing_engine(servers)
    )
    if folder is None:
        return await shown(evaluation, evaluate())
    with kept_responses(server, folder, served=await server.served(), fresh=fresh):
        return await shown(evaluation, evaluate())


@contextmanager
def kept_responses(
    server: ServerManager, folder: Path, *, served: Sequence[str] = (), fresh: bool = False
) -> Iterator[None]:
    """Keep in `folder` what the engines answer inside the block; forget it when the block ends without an error.

    Args:
        served: as `ServerManager.served`; what others gave before is forgotten.
        fresh: forget what an earlier process kept.

    Raises:
        LaunchError: another process evaluates into the same folder.
    """
    lock = take_lock(folder / "evaluate.lock", otherwise="give this evaluation another folder")
    is_other = _is_other_model(folder, served)
    journal = ResponseJournal(folder / "evaluate.journal", done={_KEY} if fresh or is_other else ())
    server.keep_responses(OneByOne(journal, streams=False, seed=None, evaluations=True))
    evaluation = current_work.set(Work(item=None, key=_KEY, task=_KEY))
    try:
        yield
        journal.settle(_KEY)
        (folder / ENGINES_FILE).unlink(missing_ok=True)
    finally:
        current_work.reset(evaluation)
        server.keep_responses(None)
        journal.close()
        os.close(lock)
        if journal.reused_responses:
            logger.info("responses of an earlier process used again: %d", journal.reused_responses)


def _is_other_model(folder: Path, served: Sequence[str]) -> bool:
    """Note what is served; tell if something else gave what is kept. Unknown is no difference."""
    path = folder / ENGINES_FILE
    before = (read_object(path) or {}).get("served")
    if served:
        write_text_atomic(path, orjson.dumps({"served": [*served]}).decode())
    if before is None or not served or before == [*served]:
        return False
    logger.warning("evaluated from the beginning: the engines serve %s, and served %s before", served, before)
    return True
