"""A running evaluation: how many of its items are done, what engines have answered, and how fast.

    evaluate_progress.json    in the folder of the results while it runs; stays when it fails, is stopped or killed

Items are counted where the evaluation hands them to `evaluate_items`; answers and tokens are counted always.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar, overload

from atroposlib.rollouts.failures import describe_error
from atroposlib.rollouts.progress import ProgressDisplay, ProgressFile, State
from atroposlib.rollouts.trace import Chat, Chats, EngineReply, RolloutTrace, tracing
from atroposlib.status.page import write_last_page
from atroposlib.status.table import duration
from atroposlib.type_definitions import FinishReason, JsonObject

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROGRESS_FILE = "evaluate_progress.json"
TICK_S = 1.0


class _NoChats(Chats):
    def note(
        self, ids: Sequence[int], chat: Chat | None, *, ended: FinishReason | None = None, made_up: bool = False
    ) -> None:
        """Keep nothing: an evaluation writes its own samples."""


@dataclass(slots=True)
class _Replies(RolloutTrace):
    """Counts replies without keeping them, as an evaluation may have millions."""

    answers: int = 0
    chats: Chats = field(default_factory=_NoChats)

    def record(self, reply: EngineReply) -> None:
        self.answers += len(reply.finish_reasons)
        self.usage["completion_tokens"] += reply.completion_tokens


@dataclass
class Evaluation(ProgressFile):
    """One evaluation."""

    mode: str = "evaluate"
    _: KW_ONLY
    state: State = "running"
    step: int | None = None  # of the trainer, when it began; None: no trainer
    requests_out: Callable[[], int] = lambda: 0
    missing: Callable[[], str | None] = lambda: None  # the counterpart that it waits for
    items: int = 0  # 0: the evaluation does not say how many there are
    items_done: int = 0
    replies: _Replies = field(default_factory=_Replies)

    async def counted(self, evaluating: Awaitable[T]) -> T:
        """Await it, and count what it evaluates meanwhile."""
        token = _current.set(self)
        try:
            with tracing(self.replies):
                return await evaluating
        finally:
            _current.reset(token)

    def line(self) -> str:
        items_s, answers_s, tokens_s = self.rates()
        parts = [f"{self.items_done}/{self.items} items"] if self.items else []
        parts += [f"{self.replies.answers} answers", f"{answers_s:.1f} answers/s", f"{tokens_s:.0f} tokens/s"]
        parts.append(f"in flight {self.requests_out()}")
        if items_s and self.items:
            parts.append(f"ETA {duration((self.items - self.items_done) / items_s)}")
        if missing := self.missing():
            parts.append(f"waiting for {missing}")
        return " | ".join(parts)

    def sample(self) -> None:
        """Remember the counts now, for the rates of the last minute."""
        self._rates.add(self.items_done, self.replies.answers, self.replies.usage["completion_tokens"])

    def counts(self) -> JsonObject:
        return {
            "waiting_for": self.missing() if self.state == "running" else None,
            "groups_done": self.items_done,
            "groups_total": self.items or None,
            "responses": self.replies.answers,
            "completion_tokens": self.replies.usage["completion_tokens"],
            "in_flight": self.requests_out(),
            "elapsed_s": time.monotonic() - self._began_s,
        }

    def remove(self) -> None:
        """Remove the progress file, whose results say it all, for good: a thread may be about to write it again."""
        with self._writing:
            path, self.path = self.path, None
        if path is not None:
            path.unlink(missing_ok=True)
            write_last_page(path.parent)


_current: ContextVar[Evaluation | None] = ContextVar("current_evaluation", default=None)


def current_evaluation() -> Evaluation | None:
    """Return the evaluation that is running here, or None."""
    return _current.get()


async def shown(evaluation: Evaluation, evaluating: Awaitable[T]) -> T:
    """Await it, count and show what it evaluates; inside another evaluation it counts as part of that one."""
    if _current.get() is not None:
        return await evaluating
    evaluation.write()
    display = ProgressDisplay(evaluation)
    display.start()
    ticking = asyncio.create_task(_tick(evaluation, display))
    try:
        result = await evaluation.counted(evaluating)
        evaluation.state = "done"
        return result
    except BaseException as error:
        evaluation.state = "stopped" if isinstance(error, asyncio.CancelledError) else "failed"
        evaluation.last_error = describe_error(error) if evaluation.state == "failed" else None
        raise
    finally:
        ticking.cancel()
        evaluation.sample()
        evaluation.write()
        display.stop()
        if evaluation.state == "done":
            evaluation.remove()


async def _tick(evaluation: Evaluation, display: ProgressDisplay) -> None:
    said = None
    while True:
        evaluation.sample()
        if (missing := evaluation.missing()) and missing != said:
            logger.warning("waiting for %s", missing)
        said = missing
        display.update()
        await asyncio.to_thread(evaluation.write)
        await asyncio.sleep(TICK_S)


@overload
async def evaluate_items(items: Iterable[Awaitable[T]]) -> list[T]: ...


@overload
async def evaluate_items(items: Iterable[Awaitable[T]], *, return_exceptions: bool) -> list[T | BaseException]: ...


async def evaluate_items(
    items: Iterable[Awaitable[T]], *, return_exceptions: bool = False
) -> list[T] | list[T | BaseException]:
    """Await all, as `asyncio.gather` does; each is an item of the running evaluation, which shows how many are done."""
    evaluation, evaluated = _current.get(), list(items)
    if evaluation is None:
        return await asyncio.gather(*evaluated, return_exceptions=return_exceptions)
    evaluation.items += len(evaluated)

    async def count(item: Awaitable[T]) -> T:
        try:
            return await item
        finally:
            evaluation.items_done += 1

    return await asyncio.gather(*map(count, evaluated), return_exceptions=return_exceptions)
