"""The evaluate mode. It continues after a kill: finished responses are kept with its results until it has ended well.

    evaluate.journal.1, ...    responses so far, see `atroposlib.rollouts.journal`
    evaluate.engines.json      model and weights that gave them
    evaluate.lock              held by the process that evaluates
    evaluate_progress.json     see `atroposlib.rollouts.evaluation`

The evaluation itself runs again from its beginning, with the scores that this makes; only what it asks the engine is
answered from the journal where the answer is known. A request is known by its model, prompt and sampling parameters.
Where the engines say that they serve another model or other weights now, nothing that was kept is used.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import orjson

from atroposlib.envs.hooks import EnvHooks
from atroposlib.envs.server_handling.one_by_one import OneByOne
from atroposlib.envs.server_handling.server_manager import ServerManager, missing_engine, requests_out
from atroposlib.lock_files import take_lock
from atroposlib.paths import writable_dir, write_text_atomic
from atroposlib.rollouts.evaluation import PROGRESS_FILE, Evaluation, shown
from atroposlib.rollouts.journal import ResponseJournal
from atroposlib.rollouts.run import CHECK_S, EXIT_DONE, EXIT_WORK_REMAINS, STOP_TIMEOUT_S
from atroposlib.rollouts.source import Work, current_work
from atroposlib.rollouts.stop import StopSignals

logger = logging.getLogger(__name__)

T = TypeVar("T")
_KEY = "evaluation"
ENGINES_FILE = "evaluate.engines.json"


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
    if not env.config.data_dir_to_save_evals:
        await shown_evaluation(_set_up_and_evaluate(env), env.server, env.label)
        return
    folder = writable_dir(env.config.data_dir_to_save_evals, what="env.data_dir_to_save_evals")
    if env.settings_text:
        write_text_atomic(folder / "evaluate_config.yaml", env.settings_text)
    with kept_responses(env.server, folder, served=await env.server.served(), fresh=env.fresh):
        await shown_evaluation(_set_up_and_evaluate(env), env.server, env.label, folder)


async def _set_up_and_evaluate(env: EnvHooks) -> None:
    await env.setup()
    await env.evaluate()


async def shown_evaluation(evaluating: Awaitable[T], server: ServerManager, name: str, folder: Path | None = None) -> T:
    """Await it, count and show what it evaluates; `folder` gets the progress file."""
    servers = server.servers
    return await shown(
        Evaluation(
            name,
            folder / PROGRESS_FILE if folder else None,
            requests_out=lambda: requests_out(servers),
            missing=lambda: missing_engine(servers),
        ),
        evaluating,
    )


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
    before = orjson.loads(path.read_bytes()) if path.exists() else None
    if served:
        write_text_atomic(path, orjson.dumps([*served]).decode())
    if before is None or not served or before == [*served]:
        return False
    logger.warning("evaluated from the beginning: the engines serve %s, and served %s before", served, before)
    return True
