"""A rollout is an API key: whatever program holds it talks to the model, and every call goes into the rollout's record.

The order of one request: key, end and budget, retry, generation, record (durable where there is a log), reply. Nothing
is replied that is not recorded, and a request that is sent again gets the reply of the first.
"""

import asyncio
import contextlib
import contextvars
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from atroposlib.envs.server_handling.agents.normalise import SystemPrompts, normaliser
from atroposlib.envs.server_handling.agents.record import (
    Answer,
    CallLog,
    Exchange,
    FinishedRollout,
    RolloutLog,
    reply_id,
    restored,
    written,
)
from atroposlib.envs.server_handling.agents.settings import Asked, RolloutSettings, check_usable, counted_sampling
from atroposlib.envs.server_handling.managed_server import ChatRequest, ManagedServer, Reply
from atroposlib.envs.server_handling.server_baseline import Server
from atroposlib.errors import AtroposError, RequestFault, RolloutFault
from atroposlib.rollouts.trace import EngineReply, current_trace, held_replies
from atroposlib.type_definitions import JsonObject, Tokenizer

logger = logging.getLogger(__name__)

BUDGET_TEXT = "The budget of this conversation is used up."
"""Said to an agent that asks once more; an empty reply would be asked for again. No part of the record's tokens."""

LOOK_S = 10.0  # between two looks for idle rollouts
KEPT_FOR_RETRY_S = 60.0
"""A request whose client went away runs on for so long, for a retry to join; then it is aborted at the engine."""


class Refusal(AtroposError):
    """A request that is answered with this status, and the same whenever it is sent again."""

    status, kind = 400, "invalid_request_error"


class SealedError(Refusal):
    """The rollout has ended; nothing is generated for it any more."""

    status = 409


class NotFoundError(Refusal):
    """There is no such rollout, or no such call in it."""

    status, kind = 404, "not_found_error"


@dataclass(slots=True)
class _Running:
    """A request that runs."""

    digest: bytes
    waiting: int = 0  # clients that wait for its reply
    reserved: int = 0  # tokens of the budget that it may use
    abandonment: asyncio.TimerHandle | None = None  # while nobody waits

    @contextlib.contextmanager
    def waited_for(self, task: "asyncio.Task[Exchange]", abandon: Callable[..., None]) -> Iterator[None]:
        """Count a client that waits. Once none does, the request is abandoned after `KEPT_FOR_RETRY_S`."""
        self.waiting += 1
        self.keep()
        try:
            yield
        finally:
            self.waiting -= 1
            if not self.waiting and not task.done():
                self.abandonment = asyncio.get_running_loop().call_later(KEPT_FOR_RETRY_S, abandon, task)

    def keep(self) -> None:
        if self.abandonment is not None:
            self.abandonment.cancel()


class Rollout:
    """One rollout: its settings, its record, and what runs for it now."""

    def __init__(
        self,
        settings: RolloutSettings,
        managed: ManagedServer,
        *,
        log: CallLog | None = None,
        key: str | None = None,
        score_key: str | None = None,
        created: float | None = None,
        session_model: str | None = None,
    ) -> None:
        """`session_model` makes it the rollout of a proxy session, with the name of its model in replies."""
        self.settings, self.managed = settings, managed
        self.id = settings.rollout_id or f"rollout-{secrets.token_hex(8)}"
        self.key = key or f"sk-rollout-{secrets.token_urlsafe(32)}"
        self.score_key = score_key or f"sk-score-{secrets.token_urlsafe(32)}"
        self.is_session = session_model is not None
        self.model_name = session_model or managed.server.config.model_name
        self.created = time.time() if created is None else created
        self._began = time.monotonic() - max(0.0, time.time() - self.created)  # ago by the clock of the last process
        self.last_used = time.monotonic()
        self.exchanges: list[Exchange] = []
        self.replies: list[EngineReply] = []
        self.scores: list[JsonObject] = []
        self.end_reason: str | None = None
        self.is_sealed = False  # by whoever rolls out; a budget that is used up only ends what is generated
        self._system_prompts = SystemPrompts()
        self.faults: Counter[str] = Counter()  # of requests that got no reply, by class
        self.lost: dict[bytes, str] = {}  # requests that failed by no fault of theirs, by digest, until answered
        self._running: dict[asyncio.Task[Exchange], _Running] = {}
        self._log = RolloutLog(log, self.id)
        self._left: JsonObject | None = None  # of the record, where the calls are in the log only
        self._ended = asyncio.Event()
        self._context = contextvars.copy_context()  # of whoever rolls out: its trace, and its journal of responses

    # -- requests ------------------------------------------------------------------------------------------------

    async def exchange(self, asked: Asked, digest: bytes, *, is_retry: bool = False) -> Exchange:
        """Return the reply to a request, once it is recorded.

        Args:
            digest: of the request; a retry joins the running request of the same digest, or gets its reply again.

        Raises:
            OSError: the reply cannot be written now; a retry gets it once it is.
            SealedError: the rollout has ended, or its budget was used up before.
            RolloutFault: as `ManagedServer.answer`.
        """
        self.last_used = time.monotonic()
        if is_retry:
            tasks = (task for task, one in self._running.items() if one.digest == digest)
            running = next((task for task in tasks if not task.done() and not task.cancelling()), None)
            if running is not None:
                return await self._joined(running)
            earlier = next((one for one in reversed(self.exchanges) if one.digest == digest), None)
            if earlier is not None:
                self._log.write()
                return earlier
        default = 1024 if self.is_session else None
        used, notes = counted_sampling(self.settings, asked, self.managed.thoughts_before, default_max_tokens=default)
        if self.end_reason is not None or self.spent():
            return self._budget_said(asked, digest)
        running, context = _Running(digest), self._context.copy()
        generation = self._generate(asked, running, used, notes)
        task = asyncio.get_running_loop().create_task(generation, context=context)
        self._running[task] = running
        task.add_done_callback(self._done)
        return await self._joined(task)

    async def _joined(self, task: "asyncio.Task[Exchange]") -> Exchange:
        with self._running[task].waited_for(task, self._abandon):
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    raise SealedError(f"rollout {self.id} ended while this request ran") from None
                raise

    def _abandon(self, task: "asyncio.Task[Exchange]") -> None:
        """Abort a request; the engine does so when its connection closes."""
        if not task.cancelling() and task.cancel():
            self.faults["abandoned"] += 1

    def _done(self, task: "asyncio.Task[Exchange]") -> None:
        self.last_used = time.monotonic()
        self._running.pop(task).keep()

    @property
    def is_busy(self) -> bool:
        return any(not task.done() for task in self._running)

    def spent(self) -> str | None:
        """Name the budget that is used up; None while none is."""
        settings, calls = self.settings, len(self.exchanges) + len(self._running)
        if settings.max_calls is not None and calls >= settings.max_calls:
            return f"{calls} of {settings.max_calls} calls"
        if settings.max_tokens is not None and (tokens := self.generated_tokens()) >= settings.max_tokens:
            return f"{tokens} of {settings.max_tokens} tokens"
        if settings.timeout_s is not None and (seconds := time.monotonic() - self._began) >= settings.timeout_s:
            return f"{seconds:.0f} of {settings.timeout_s:.0f} s"
        return None

    def generated_tokens(self) -> int:
        if self._left is not None:
            return self._left["generated_tokens"]
        return sum(answer.completion_tokens for exchange in self.exchanges for answer in exchange.answers)

    async def _generate(self, asked: Asked, running: _Running, used: JsonObject, notes: list[str]) -> Exchange:
        started = time.time()
        try:
            if not await self._reserve(running, used):
                return self._budget_said(asked, running.digest)
            with held_replies() as engine:
                replies = await _replies_of(self.managed, asked, used)
        except RolloutFault as fault:
            self.faults[fault.failure_class] += 1
            if not isinstance(fault, RequestFault):
                self.lost[running.digest] = str(fault)
            raise
        finally:
            running.reserved = 0
        self.lost.pop(running.digest, None)
        self.note(engine)
        if asked.chat is not None and replies and replies[0].call.parent is None:
            notes += self._system_prompts.notes_of(asked.chat)
        exchange = Exchange(0, running.digest, asked.dialect, asked.recorded(), used, started, time.time())
        exchange.answers, exchange.calls = [Answer.of(reply) for reply in replies], [reply.call for reply in replies]
        exchange.versions, exchange.notes = [reply.weight_version for reply in engine], [*asked.notes, *notes]
        return self._recorded(exchange)

    def note(self, replies: Sequence[EngineReply]) -> None:
        """Count the engine's replies as those of this rollout."""
        self.replies.extend(replies)
        if (trace := current_trace()) is not None:
            for reply in replies:
                trace.record(reply)

    def finished(self, score: float) -> FinishedRollout:
        """Return the rollout as it is kept until its group is written."""
        return FinishedRollout(self.id, score, [written(exchange) for exchange in self.exchanges], self.replies)

    def resume(self, finished: FinishedRollout) -> None:
        """Take the place of a rollout that an earlier process has finished."""
        for line in finished.exchanges:
            self.exchanges.append(restored(line, self.exchanges, self.managed))
        self.note(finished.replies)
        self._end("done", is_sealed=True)

    async def _reserve(self, running: _Running, used: JsonObject) -> bool:
        """Set aside what a request may generate, `max_tokens` for each choice; False where the budget has no room.

        Where less is left than it wants, it first waits for those that run, which may not need all of theirs.
        """
        if (most := self.settings.max_tokens) is None:
            return True
        choices = used.get("n") or 1
        length = await self.managed.context_length()
        wanted = min(used.get("max_tokens") or most, length or most)
        while True:
            others = {task: one.reserved for task, one in self._running.items() if one.reserved}
            left = (most - self.generated_tokens() - sum(others.values())) // choices
            if left >= wanted or not others:
                break
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        used["max_tokens"] = min(wanted, left)
        running.reserved = max(0, used["max_tokens"]) * choices
        return running.reserved > 0

    def _budget_said(self, asked: Asked, digest: bytes) -> Exchange:
        """End the rollout with one last reply; SealedError where it has ended before.

        A request that could not be answered is told so (RequestFault) in any case, and ends nothing.
        """
        if asked.chat is not None:
            self.managed.prompt_of(asked.chat)
        if self.end_reason is not None:
            raise SealedError(f"rollout {self.id} has ended ({self.end_reason}); start another one")
        self._end(f"budget: {self.spent() or 'too few tokens are left for a token of each choice'}", is_sealed=False)
        now, answer = time.time(), Answer({"role": "assistant", "content": BUDGET_TEXT}, "stop", 0, 0)
        return self._recorded(
            Exchange(0, digest, asked.dialect, {}, {}, now, now, [answer], notes=["a text of the harness"])
        )

    def _recorded(self, exchange: Exchange) -> Exchange:
        exchange.number = len(self.exchanges)
        exchange.place_calls()
        self.exchanges.append(exchange)
        if self._log.is_kept:
            self._log.write({"exchange": written(exchange)})
        return exchange

    # -- what the environment says -------------------------------------------------------------------------------

    def add_score(
        self, score: float, *, name: str | None = None, call_id: str | None = None, final: bool = False
    ) -> None:
        """Add a score of the rollout, or of the call whose reply has the id `call_id`; never changed afterwards.

        RequestFault for NaN and infinities, NotFoundError where the rollout has no such call.
        """
        if not math.isfinite(score):
            raise RequestFault(f"the score is {score}; a score is a finite number, and a failure has none")
        if call_id is not None and call_id not in {call["id"] for call in self._calls() if call["calls"]}:
            raise NotFoundError(
                f"rollout {self.id} has no call {call_id!r}; call_id is the id of one of its replies, as the agent got "
                "it and the record has it; leave it out for a score of the whole rollout"
            )
        entry = {"score": score, "name": name, "call_id": call_id, "final": final, "at": time.time()}
        self.scores.append(entry)
        self._log.write({"score": entry})

    @property
    def score(self) -> float | None:
        """The last final score, else the last of the rollout as a whole; None without any."""
        whole = [entry for entry in self.scores if entry["call_id"] is None]
        last = [entry for entry in whole if entry["final"]] or whole
        return float(last[-1]["score"]) if last else None

    async def end(self, reason: str = "ended", *, grace_s: float = 0.0) -> None:
        """Seal the rollout: requests that run get `grace_s` seconds more, later ones are refused."""
        self._end(reason, is_sealed=True)
        if running := [task for task in self._running if not task.done()]:
            await asyncio.wait(running, timeout=grace_s)
            for task in running:
                self._abandon(task)
            await asyncio.gather(*running, return_exceptions=True)

    def _end(self, reason: str, *, is_sealed: bool) -> None:
        self._ended.set()
        is_new = self.end_reason is None or (is_sealed and not self.is_sealed)
        self.end_reason, self.is_sealed = self.end_reason or reason, self.is_sealed or is_sealed
        self._log.write(*([{"end": reason, "sealed": is_sealed}] if is_new else []))

    def end_if_idle(self, idle_s: float | None) -> bool:
        """Seal the rollout where its agent has sent nothing for so long, and free what its log has; tell if it did.

        Args:
            idle_s: in seconds, where the settings name none; None: it is never idle.

        Raises:
            OSError: the end cannot be written.
        """
        idle_s = self.settings.idle_s or idle_s
        if idle_s is None or self.is_busy or time.monotonic() - self.last_used < idle_s:
            return False
        self._log.write()
        if not self.is_sealed:
            self._end(f"idle: no request for {idle_s:g} s", is_sealed=True)
        if self._log.is_kept and self._left is None:
            self._left = self._counts()
            self.exchanges, self.replies = [], []
            self._system_prompts = SystemPrompts()
            self.managed.reset()
        return True

    def set_aside(self, reason: str) -> None:
        """Generate nothing more until the gateway starts again, unless it has ended: this is not in the log."""
        if self.end_reason is None:
            self.end_reason = f"set aside: {reason}"
            logger.warning("rollout %s is set aside, and continues after a start where it can: %s", self.id, reason)

    def refuse_if_sealed(self) -> None:
        """Raise SealedError once whoever rolls out has ended the rollout: its agent has no say in it any more."""
        if self.is_sealed:
            raise SealedError(f"rollout {self.id} has ended ({self.end_reason}); its agent can add no score")

    async def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until the rollout is sealed, at most so long; tell if it is."""
        if self.end_reason is None and timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), timeout_s)
        return self.end_reason is not None

    def record(self) -> JsonObject:
        return {
            "id": self.id,
            "settings": self.settings.model_dump(),
            "created": self.created,
            "end_reason": self.end_reason,
            "score": self.score,
            "scores": self.scores,
            "faults": dict(self.faults),
            "running": len(self._running),
            **(self._left or self._counts()),
            "calls": self._calls(),
        }

    def _calls(self) -> list[JsonObject]:
        calls = [written(exchange) for exchange in self.exchanges] if self._left is None else self._log.exchanges()
        return [{"id": reply_id(self.id, call["dialect"], call["number"]), **call} for call in calls]

    def _counts(self) -> JsonObject:
        return {"generated_tokens": self.generated_tokens(), "differences": self.managed.lineage.differences}


async def _replies_of(managed: ManagedServer, asked: Asked, used: JsonObject) -> list[Reply]:
    if (chat := asked.chat) is not None:
        return await managed.answer(ChatRequest(chat.messages, chat.tools, chat.tool_choice, used))
    return await managed.complete(asked.prompt or "", used)


def managed_for(server: Server, tokenizer: Tokenizer, settings: RolloutSettings) -> ManagedServer:
    """Return the managed server of a rollout; ConfigError for an unknown tool parser."""
    return ManagedServer(
        server,
        tokenizer,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        keeps_thoughts=settings.history == "keep",
        for_agents=True,
        normalise=normaliser(settings.normalise),
    )


class Rollouts:
    """All rollouts of a gateway, by id and by key.

    Args:
        make: a managed server for the settings of a rollout; ConfigError or RequestFault where there can be none.
        log: where their records are kept; what is in it is there again.
        idle_s: seconds without a request of its agent that end a rollout whose settings name none; None: no limit.

    No timer runs: a rollout is looked at whenever it is asked for, and all of them every `LOOK_S` of use.
    """

    def __init__(
        self,
        make: Callable[[RolloutSettings], ManagedServer],
        log: CallLog | None = None,
        *,
        idle_s: float | None = None,
    ) -> None:
        self._make, self._log, self._idle_s = make, log, idle_s
        self._awake: dict[str, Rollout] = {}  # that may still become idle
        self._looked = time.monotonic()
        self._by_id: dict[str, Rollout] = {}
        self._by_key: dict[str, Rollout] = {}
        self._by_score_key: dict[str, Rollout] = {}
        gone: dict[str, str] = {}  # by id: why a recorded rollout cannot continue
        for event in log.events() if log is not None else ():
            self._replay(event, gone)
        for rollout_id, reason in gone.items():
            self._by_id[rollout_id].set_aside(reason)

    def create(self, settings: RolloutSettings) -> Rollout:
        """Return a new rollout; the same one for an id that is there.

        Raises:
            RequestFault: that one has other settings, or no request could be made with these.
        """
        self._look_at_all()
        check_usable(settings)
        if (known := self._by_id.get(settings.rollout_id or "")) is not None:
            before, now = (each.model_dump(exclude={"rollout_id"}) for each in (known.settings, settings))
            if differing := [f"{key}: {before[key]!r}, not {now[key]!r}" for key in now if before[key] != now[key]]:
                said = f"rollout {known.id} is there with other settings ({'; '.join(differing)})"
                raise RequestFault(f"{said}; choose another rollout_id, or delete that rollout")
            return known
        rollout = Rollout(settings, self._make(settings), log=self._log)
        if self._log is not None:
            made = {"id": rollout.id, "key": rollout.key, "score_key": rollout.score_key, "created": rollout.created}
            self._log.append({"created": {**made, "settings": settings.model_dump()}, "rollout": rollout.id})
        return self._added(rollout)

    def of_key(self, key: str | None) -> Rollout | None:
        return self._looked_at(self._by_key.get(key) if key else None)

    def of_score_key(self, key: str) -> Rollout | None:
        return self._looked_at(self._by_score_key.get(key))

    def of_id(self, rollout_id: str) -> Rollout | None:
        return self._looked_at(self._by_id.get(rollout_id))

    def forget(self, rollout: Rollout) -> None:
        """Its rows were taken: it is not needed any more, nor after a restart; OSError: that cannot be written."""
        if self._by_id.get(rollout.id) is not rollout:  # it is forgotten, and its id may have been used again
            return
        if self._log is not None:
            self._log.forget(rollout.id)
        self._by_id.pop(rollout.id, None)
        self._awake.pop(rollout.id, None)
        self._by_key.pop(rollout.key, None)
        self._by_score_key.pop(rollout.score_key, None)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(list(self._by_id.values()))

    def _looked_at(self, rollout: Rollout | None) -> Rollout | None:
        self._look_at_all()
        if rollout is not None:
            self._look(rollout)
        return rollout

    def _look_at_all(self) -> None:
        if (now := time.monotonic()) - self._looked >= LOOK_S:
            self._looked = now
            for rollout in list(self._awake.values()):
                self._look(rollout)

    def _look(self, rollout: Rollout) -> None:
        try:
            if rollout.end_if_idle(self._idle_s):
                self._awake.pop(rollout.id, None)
        except OSError as error:
            logger.warning("rollout %s is idle and has ended, which cannot be written: %s", rollout.id, error)

    def _added(self, rollout: Rollout) -> Rollout:
        self._by_id[rollout.id] = self._awake[rollout.id] = rollout
        self._by_key[rollout.key] = rollout
        self._by_score_key[rollout.score_key] = rollout
        return rollout

    def _replay(self, event: JsonObject, gone: dict[str, str]) -> None:
        if (made := event.get("created")) is not None:
            settings = RolloutSettings.model_validate(made["settings"]).model_copy(update={"rollout_id": made["id"]})
            try:
                managed = self._make(settings)
            except RequestFault as fault:  # its server is gone; reading its record needs none
                managed = self._make(settings.model_copy(update={"base_url": None}))
                gone[made["id"]] = str(fault)
            keys = {name: made[name] for name in ("key", "score_key", "created")}
            self._added(Rollout(settings, managed, log=self._log, **keys))
            return
        if (rollout := self._by_id.get(event["rollout"])) is None:
            logger.warning("an event of rollout %s, which was deleted before, is left out", event["rollout"])
            return
        if (exchange := event.get("exchange")) is not None:
            rollout.exchanges.append(restored(exchange, rollout.exchanges, rollout.managed))
        elif (score := event.get("score")) is not None:
            rollout.scores.append(score)
        else:
            rollout.end_reason = rollout.end_reason or event["end"]
            rollout.is_sealed |= event.get("sealed", True)
