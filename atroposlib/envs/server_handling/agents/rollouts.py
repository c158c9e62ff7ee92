"""A rollout is an API key: whatever program holds it talks to the model, and every call goes into the rollout's record.

The order of one request: key, end and budget, retry, generation, record (durable where there is a log), reply. Nothing
is replied that is not recorded, and a request that is sent again gets the reply of the first.
"""

import asyncio
import contextvars
import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from atroposlib.envs.server_handling.agents.normalise import normaliser
from atroposlib.envs.server_handling.agents.record import (
    Answer,
    CallLog,
    Exchange,
    FinishedRollout,
    Places,
    restored,
    written,
)
from atroposlib.envs.server_handling.conversation import canonical
from atroposlib.envs.server_handling.managed_server import ChatRequest, ManagedServer, Reply
from atroposlib.envs.server_handling.sampling import GRAMMARS, words
from atroposlib.envs.server_handling.tool_formats import tool_format
from atroposlib.errors import RequestFault, RolloutFault
from atroposlib.rollouts.trace import EngineReply, current_trace, held_replies

logger = logging.getLogger(__name__)

BUDGET_TEXT = "The budget of this conversation is used up."
"""Said to an agent that asks once more; an empty reply would be asked for again. No part of the record's tokens."""

LOOK_S = 10.0  # between two looks for idle rollouts
KEPT_FOR_RETRY_S = 60.0
"""A request whose client went away runs on for so long, for a retry to join; then it is aborted at the engine."""

_SHAPES = words(
    """temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty logit_bias regex
    json_schema ebnf structural_tag min_new_tokens min_tokens ignore_eos allowed_token_ids bad_words seed
    sampling_seed"""
)
"""They change the distribution that tokens are drawn from."""


class SealedError(Exception):
    """The rollout has ended; nothing is generated for it any more."""


class RolloutSettings(BaseModel):
    """Sampling and budgets of a rollout, and what it belongs to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout_id: str | None = Field(None, description="Name of the rollout; asked for again, the same one is given.")
    item_id: str | None = Field(None, description="What is rolled out.")
    group_id: str | None = Field(None, description="Rollouts of one item that are compared.")
    base_url: str | None = Field(None, description="Generate on the server with this address; null: the least used.")
    tool_parser: str = Field("hermes", description="How the model writes tool calls; names as SGLang's.")
    reasoning_parser: str | None = Field("think", description="Take <think> blocks out of replies; null: leave them.")
    history: Literal["keep", "template"] = Field(
        "keep", description="A turn sent back without its thoughts: keep its tokens, or let the template render it."
    )
    normalise: list[str] = Field(
        default_factory=list,
        description="Rewritings that count as none: names of agent programs (smolagents), or /PATTERN/ for what is not "
        "compared in messages that are not the assistant's.",
    )
    sampling: dict[str, Any] = Field(default_factory=dict, description="Sampling parameters, named as engines do.")
    locked: bool = Field(True, description="The agent's own parameters that change the distribution have no effect.")
    grammars: bool | None = Field(
        None,
        description="Bind the model to the grammar of a request (response_format, guided_*, strict tools), where the "
        "engine can; false: note it only. null: where sampling is not locked.",
    )
    max_calls: PositiveInt | None = Field(None, description="Most requests.")
    max_tokens: PositiveInt | None = Field(None, description="Most generated tokens.")
    timeout_s: PositiveFloat | None = Field(None, description="Seconds from its creation to the last request.")
    idle_s: PositiveFloat | None = Field(
        None, description="Seconds without a request of the agent that end the rollout; null: as its gateway has it."
    )

    @classmethod
    def of(cls, **settings: Any) -> "RolloutSettings":
        """Settings of which only some are given."""
        return cls.model_validate(settings)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as a dialect understood it: a chat, or a text to complete."""

    dialect: str
    chat: ChatRequest | None
    prompt: str | None
    sampling: Mapping[str, Any]
    model: str
    notes: Sequence[str] = ()
    strict: Mapping[str, Any] | None = None  # schema of each tool's arguments, where one is strict


@dataclass(slots=True)
class _Running:
    """A request that runs."""

    digest: bytes
    waiting: int = 0  # clients that wait for its reply
    reserved: int = 0  # tokens of the budget that it may use
    abandonment: asyncio.TimerHandle | None = None  # while nobody waits


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
        self.last_used = time.monotonic()
        self.exchanges: list[Exchange] = []
        self.places = Places(self.exchanges)
        self.replies: list[EngineReply] = []
        self.scores: list[dict[str, Any]] = []
        self.end_reason: str | None = None
        self.is_sealed = False  # by whoever rolls out; a budget that is used up only ends what is generated
        self._system_prompts: dict[bytes, str] = {}  # by the turn behind them
        self._is_told = False  # that one of them changes
        self.faults: Counter[str] = Counter()  # of requests that got no reply, by class
        self._running: dict[asyncio.Task[Exchange], _Running] = {}
        self._log = log
        self._left: dict[str, Any] | None = None  # of the record, where the calls are in the log only
        self._ended = asyncio.Event()
        self._context = contextvars.copy_context()  # of whoever rolls out: its trace, and its journal of responses

    # -- requests ------------------------------------------------------------------------------------------------

    async def exchange(self, asked: Asked, digest: bytes, *, is_retry: bool = False) -> Exchange:
        """The reply to a request, once it is recorded.

        Args:
            digest: of the request; a retry joins the running request of the same digest, or gets its reply again.

        Raises:
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
                return earlier
        if self.end_reason is not None:
            raise SealedError(f"rollout {self.id} has ended ({self.end_reason}); start another one")
        if self.spent():
            return self._budget_said(asked, digest)
        running = _Running(digest)
        work = self._generate(asked, running)
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._running[task] = running
        task.add_done_callback(self._done)
        return await self._joined(task)

    async def _joined(self, task: "asyncio.Task[Exchange]") -> Exchange:
        """Wait for a running request. Once nobody waits, it runs on for `KEPT_FOR_RETRY_S`."""
        running = self._running[task]
        running.waiting += 1
        if running.abandonment is not None:
            running.abandonment.cancel()
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise SealedError(f"rollout {self.id} ended while this request ran") from None
            raise
        finally:
            running.waiting -= 1
            if not running.waiting and not task.done():
                loop = asyncio.get_running_loop()
                running.abandonment = loop.call_later(KEPT_FOR_RETRY_S, self._abandon, task)

    def _abandon(self, task: "asyncio.Task[Exchange]") -> None:
        """Abort a request; the engine does so when its connection closes."""
        if not task.cancelling() and task.cancel():
            self.faults["abandoned"] += 1

    def _done(self, task: "asyncio.Task[Exchange]") -> None:
        if (timer := self._running.pop(task).abandonment) is not None:
            timer.cancel()

    @property
    def is_busy(self) -> bool:
        """Tell if a request runs."""
        return any(not task.done() for task in self._running)

    def spent(self) -> str | None:
        """Name the budget that is used up; None while none is."""
        settings, calls = self.settings, len(self.exchanges) + len(self._running)
        if settings.max_calls is not None and calls >= settings.max_calls:
            return f"{calls} of {settings.max_calls} calls"
        if settings.max_tokens is not None and (tokens := self.generated_tokens()) >= settings.max_tokens:
            return f"{tokens} of {settings.max_tokens} tokens"
        if settings.timeout_s is not None and (seconds := time.time() - self.created) >= settings.timeout_s:
            return f"{seconds:.0f} of {settings.timeout_s:.0f} s"
        return None

    def generated_tokens(self) -> int:
        """Tokens that the model wrote for this rollout."""
        if self._left is not None:
            return self._left["generated_tokens"]
        return sum(answer.completion_tokens for exchange in self.exchanges for answer in exchange.answers)

    async def _generate(self, asked: Asked, running: _Running) -> Exchange:
        used, notes = self._sampling(asked)
        started = time.time()
        try:
            if not await self._reserve(running, used):
                return self._budget_said(asked, running.digest)
            with held_replies() as engine:
                if asked.chat is not None:
                    chat = asked.chat
                    replies = await self.managed.answer(ChatRequest(chat.messages, chat.tools, chat.tool_choice, used))
                else:
                    replies = await self.managed.complete(asked.prompt or "", used)
        except RolloutFault as fault:
            self.faults[fault.failure_class] += 1
            raise
        finally:
            running.reserved = 0
        self.note(engine)
        if asked.chat is not None and replies and replies[0].call.parent is None:
            notes += self._other_system_prompt(asked.chat)
        exchange = Exchange(
            number=len(self.exchanges),
            digest=running.digest,
            dialect=asked.dialect,
            asked={**asked.sampling, "model": asked.model, **({"strict": [*asked.strict]} if asked.strict else {})},
            used=used,
            started=started,
            ended=time.time(),
            answers=[answer_of(reply) for reply in replies],
            calls=[reply.call for reply in replies],
            versions=[reply.weight_version for reply in engine],
            notes=[*asked.notes, *notes],
        )
        return self._recorded(exchange)

    def _other_system_prompt(self, chat: ChatRequest) -> list[str]:
        """Say once what differs, where a conversation begins again with another system prompt."""
        first, *others = chat.messages
        if first.get("role") not in ("system", "developer"):
            return []
        text = str(first.get("content"))
        before = self._system_prompts.setdefault(canonical([others[:1], chat.tools]), text)
        if before == text or self._is_told:
            return []
        self._is_told = True
        old, new = _differing(before, text)
        said = f"the system prompt of the same conversation said {old!r:.120} before and says {new!r:.120} now"
        note = f"{said}, which begins another row; name it in normalise as /PATTERN/ where it means nothing"
        _warn_of_prompt(text[:40], note)
        return [note]

    def note(self, replies: Sequence[EngineReply]) -> None:
        """Count the engine's replies as those of this rollout."""
        self.replies.extend(replies)
        if (trace := current_trace()) is not None:
            for reply in replies:
                trace.record(reply)

    def finished(self, score: float) -> FinishedRollout:
        """The rollout as it is kept until its group is written."""
        lines = [written(exchange, self.places) for exchange in self.exchanges]
        return FinishedRollout(self.id, score, lines, self.replies)

    def resume(self, finished: FinishedRollout) -> None:
        """Take the place of a rollout that an earlier process has finished."""
        for line in finished.exchanges:
            self.exchanges.append(restored(line, self.exchanges, self.managed))
        self.note(finished.replies)
        self._end("done", is_sealed=True)

    def _sampling(self, request: Asked) -> tuple[dict[str, Any], list[str]]:
        """The parameters that count, and what was overridden.

        Raises:
            RequestFault: a grammar for the reply, and tools that it would forbid.
        """
        settings, asked = self.settings, dict(request.sampling)
        is_bound = settings.grammars if settings.grammars is not None else not settings.locked
        locked = {*(_SHAPES if settings.locked else ())} - GRAMMARS.keys() | (
            GRAMMARS.keys() if not is_bound else set()
        )
        kept = {key: value for key, value in asked.items() if key not in locked}
        used = {"temperature": 1.0, **settings.sampling, **kept}
        if settings.locked:
            used |= settings.sampling
        if self.is_session:
            used.setdefault("max_tokens", 1024)
        notes = []
        if is_bound and not settings.sampling.keys() & GRAMMARS.keys():
            notes = self._bind(request, used)
        if limit := settings.sampling.get("max_tokens"):
            used["max_tokens"] = min(used.get("max_tokens") or limit, limit)
        given = [key for key in asked if key in _SHAPES and asked[key] != used.get(key)]
        for key in given:
            why = "grammars are only noted" if key in GRAMMARS else "sampling is locked"
            notes.append(f"{why}: {key}={repr(asked[key])[:200]} was not used")
        return used, notes

    def _bind(self, request: Asked, used: dict[str, Any]) -> list[str]:
        """Keep the calls of strict tools to their schemas; notes of what cannot be kept."""
        tools = request.chat is not None and bool(request.chat.tools) and request.chat.tool_choice != "none"
        if tools and (grammar := used.keys() & GRAMMARS.keys()):
            raise RequestFault(
                f"a reply that follows a grammar ({', '.join(grammar)}) can call no tool; leave out either of them"
            )
        if not tools or not request.strict:
            return []
        tag = tool_format(self.settings.tool_parser).strict_calls(request.strict)
        if tag is None:
            return [f"strict was not used: there is no grammar for calls as {self.settings.tool_parser} has them"]
        used["structural_tag"] = orjson.dumps(tag).decode()
        return []

    async def _reserve(self, running: _Running, used: dict[str, Any]) -> bool:
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
        """End the rollout with one last reply; SealedError where another request was told so before."""
        if self.end_reason is not None:
            raise SealedError(f"rollout {self.id} has ended ({self.end_reason}); start another one")
        self._end(f"budget: {self.spent() or 'too few tokens are left for a token of each choice'}", is_sealed=False)
        return self._said(asked, digest, BUDGET_TEXT)

    def _said(self, asked: Asked, digest: bytes, text: str) -> Exchange:
        now = time.time()
        answer = Answer({"role": "assistant", "content": text}, "stop", 0, 0)
        number = len(self.exchanges)
        return self._recorded(
            Exchange(number, digest, asked.dialect, {}, {}, now, now, [answer], notes=["a text of the harness"])
        )

    def _recorded(self, exchange: Exchange) -> Exchange:
        self.last_used = time.monotonic()
        exchange.number = len(self.exchanges)
        self.exchanges.append(exchange)
        if self._log is not None:
            self._log.append({"exchange": written(exchange, self.places), "rollout": self.id})
        return exchange

    # -- what the environment says -------------------------------------------------------------------------------

    def add_score(
        self, score: float, *, name: str | None = None, call_id: str | None = None, final: bool = False
    ) -> None:
        """Add a score of the rollout, or of one call; never changed afterwards. RequestFault for NaN and infinities."""
        if not math.isfinite(score):
            raise RequestFault(f"the score is {score}; a score is a finite number, and a failure has none")
        entry = {"score": score, "name": name, "call_id": call_id, "final": final, "at": time.time()}
        self.scores.append(entry)
        if self._log is not None:
            self._log.append({"score": entry, "rollout": self.id})

    @property
    def score(self) -> float | None:
        """The last final score, else the last of the rollout as a whole; None without any."""
        whole = [entry for entry in self.scores if entry["call_id"] is None]
        return next((float(entry["score"]) for entry in [*whole, *(e for e in whole if e["final"])][::-1]), None)

    async def end(self, reason: str = "ended", *, grace_s: float = 0.0) -> None:
        """Seal the rollout: requests that run get `grace_s` seconds more, later ones are refused."""
        self._end(reason, is_sealed=True)
        running = [task for task in self._running if not task.done()]
        if running:
            await asyncio.wait(running, timeout=grace_s)
            for task in running:
                self._abandon(task)
            await asyncio.gather(*running, return_exceptions=True)

    def _end(self, reason: str, *, is_sealed: bool) -> None:
        self._ended.set()
        is_new = self.end_reason is None or (is_sealed and not self.is_sealed)
        self.end_reason, self.is_sealed = self.end_reason or reason, self.is_sealed or is_sealed
        if is_new and self._log is not None:
            self._log.append({"end": reason, "sealed": is_sealed, "rollout": self.id})

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
        if not self.is_sealed:
            self._end(f"idle: no request for {idle_s:g} s", is_sealed=True)
        if self._log is not None and self._left is None:
            self._left = self._counts()
            self.exchanges, self.replies = [], []
            self.places = Places(self.exchanges)
            self._system_prompts.clear()
            self.managed.reset()
        return True

    def refuse_if_sealed(self) -> None:
        """Raise SealedError once whoever rolls out has ended the rollout: its agent has no say in it any more."""
        if self.is_sealed:
            raise SealedError(f"rollout {self.id} has ended ({self.end_reason}); its agent can add no score")

    async def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until the rollout is sealed, at most so long; tell if it is."""
        if self.end_reason is None and timeout_s > 0:
            try:
                await asyncio.wait_for(self._ended.wait(), timeout_s)
            except TimeoutError:
                return False
        return self.end_reason is not None

    def record(self) -> dict[str, Any]:
        """Everything that is known of the rollout, as JSON values."""
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

    def _counts(self) -> dict[str, Any]:
        return {"generated_tokens": self.generated_tokens(), "differences": self.managed.lineage.differences}

    def _calls(self) -> list[dict[str, Any]]:
        if self._left is None or self._log is None:
            return [written(exchange, self.places) for exchange in self.exchanges]
        return [event["exchange"] for event in self._log.events(self.id) if "exchange" in event]


def managed_for(server: Any, tokenizer: Any, settings: RolloutSettings) -> ManagedServer:
    """The managed server of a rollout; ConfigError for an unknown tool parser."""
    tool_format(settings.tool_parser)
    return ManagedServer(
        server,
        tokenizer,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        keeps_thoughts=settings.history == "keep",
        for_agents=True,
        normalise=normaliser(settings.normalise),
    )


def _differing(one: str, other: str) -> tuple[str, str]:
    """The parts of two texts between their common beginning and end.

    >>> _differing("Today is Monday.", "Today is Sunday.")
    ('Mon', 'Sun')
    """
    start = len(os.path.commonprefix([one, other]))  # noqa: RUF071 (characters are meant)
    end = len(os.path.commonprefix([one[start:][::-1], other[start:][::-1]]))  # noqa: RUF071
    return one[start : len(one) - end], other[start : len(other) - end]


_warned: set[str] = set()


def _warn_of_prompt(beginning: str, note: str) -> None:
    """Log a note, once for the beginning of a system prompt; a hundred of them at most."""
    if beginning not in _warned and len(_warned) < 100:
        _warned.add(beginning)
        logger.warning("%s", note)


def answer_of(reply: Reply) -> Answer:
    """A reply of the managed server as an answer."""
    return Answer(reply.message, reply.finish_reason, reply.prompt_tokens, len(reply.call.output))


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
        for event in log.events() if log is not None else ():
            self._replay(event)

    def create(self, settings: RolloutSettings) -> Rollout:
        """A new rollout; the same one for an id that is there."""
        self._look_at_all()
        if settings.rollout_id in self._by_id:
            return self._by_id[settings.rollout_id]
        rollout = Rollout(settings, self._make(settings), log=self._log)
        if self._log is not None:
            made = {"id": rollout.id, "key": rollout.key, "score_key": rollout.score_key, "created": rollout.created}
            self._log.append({"created": {**made, "settings": settings.model_dump()}, "rollout": rollout.id})
        return self._added(rollout)

    def of_key(self, key: str | None) -> Rollout | None:
        """The rollout whose key this is."""
        return self._looked_at(self._by_key.get(key) if key else None)

    def of_score_key(self, key: str) -> Rollout | None:
        """The rollout whose key for scores this is."""
        return self._looked_at(self._by_score_key.get(key))

    def of_id(self, rollout_id: str) -> Rollout | None:
        """The rollout of this id."""
        return self._looked_at(self._by_id.get(rollout_id))

    def forget(self, rollout: Rollout) -> None:
        """Its rows were taken: it is not needed any more."""
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

    def _replay(self, event: dict[str, Any]) -> None:
        if (made := event.get("created")) is not None:
            settings = RolloutSettings.model_validate(made["settings"]).model_copy(update={"rollout_id": made["id"]})
            keys = {name: made[name] for name in ("key", "score_key", "created")}
            self._added(Rollout(settings, self._make(settings), log=self._log, **keys))
            return
        rollout = self._by_id[event["rollout"]]
        if (exchange := event.get("exchange")) is not None:
            rollout.exchanges.append(restored(exchange, rollout.exchanges, rollout.managed))
        elif (score := event.get("score")) is not None:
            rollout.scores.append(score)
        else:
            rollout.end_reason = rollout.end_reason or event["end"]
            rollout.is_sealed |= event.get("sealed", True)
