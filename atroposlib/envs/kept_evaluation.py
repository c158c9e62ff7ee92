"""An evaluation that goes on after a kill: finished responses are kept beside its results until it has ended well.

    evaluate.journal.1, ...    responses so far, see `atroposlib.rollouts.journal`
    evaluate.lock              held by the process that evaluates

The evaluation itself runs again from its beginning, with the scores that this makes; only what it asks the engine is
answered from the journal where the answer is known. A request is known by its model, prompt and sampling parameters.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atroposlib.envs.server_handling.one_by_one import OneByOne
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.rollouts.journal import ResponseJournal
from atroposlib.rollouts.lock import take_lock
from atroposlib.rollouts.work import Work, current_work

logger = logging.getLogger(__name__)

_KEY = "evaluation"


@contextmanager
def kept_responses(server: ServerManager, folder: Path, *, fresh: bool = False) -> Iterator[None]:
    """Keep in `folder` what the engines answer inside the block; forget it when the block ends without an error.

    Args:
        fresh: forget what an earlier process kept.

    Raises:
        LaunchError: another process evaluates into the same folder.
    """
    lock = take_lock(folder / "evaluate.lock", otherwise="give this evaluation another folder")
    journal = ResponseJournal(folder / "evaluate.journal", done={_KEY} if fresh else ())
    server.keep_responses(OneByOne(journal, streams=False, seed=None, evaluations=True))
    evaluation = current_work.set(Work(item=None, key=_KEY, task=_KEY))
    try:
        yield
        journal.settle(_KEY)
    finally:
        current_work.reset(evaluation)
        server.keep_responses(None)
        journal.close()
        os.close(lock)
        if journal.reused_responses:
            logger.info("responses of an earlier process used again: %d", journal.reused_responses)
