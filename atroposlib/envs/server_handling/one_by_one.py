"""A request for n responses as n requests for one, so that each is kept as soon as it is finished.

A response is named by the digest of what is asked and by its place: the i-th response to the same request within one
try of an item has place i, whether it was asked for by one request of n or by n requests of one. Responses to equal
requests are exchangeable, so it does not matter which of several concurrent callers gets which place.

Asking again only for what was not finished favours short answers a little, as long ones are more often cut off by a
kill; with streams (SGLang) the tokens that were there are continued instead, and nothing is drawn twice.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import msgspec
import orjson

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.server_handling.fan_out import all_or_none, raise_first
from atroposlib.envs.server_handling.openai_wire import Parsed, join_choices, parse_chat, parse_completion, reply_facts
from atroposlib.envs.server_handling.sampling import GenerationRequest
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.errors import RolloutFault
from atroposlib.paths import expand_path
from atroposlib.rollouts.journal import PLACE_BYTES, Draft, EarlierRollouts, ResponseJournal
from atroposlib.rollouts.source import Work, current_work
from atroposlib.rollouts.trace import (
    EngineReply,
    TokensAndLogprobs,
    current_trace,
    finish_reason_of,
    further_part,
    held_replies,
    oldest_first,
    row_with_own_responses,
)
from atroposlib.type_definitions import JsonObject

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

_CHATS, _TEXTS, _TOKENS = "_chat_completion_wrapper", "_completion_wrapper", "tokens"
_LOGPROBS = "_get_logprobs_wrapper"
"""Routes, as they are part of the names of journalled responses and of their seeds: never to be changed."""

_NAMES_NOTHING = frozenset({"n", "timeout", "extra_headers", "seed"})


Result = TypeVar("Result")
Choices = TypeVar("Choices", "ChatCompletion", "Completion")


class Asker(Protocol):
    """The part of `APIServer` that sends one request and tries it again."""

    config: APIServerConfig

    async def _request(self, attempt: "Attempt[Result]", request: GenerationRequest) -> Result: ...
    async def _chat_completion_wrapper(self, **kwargs: object) -> "ChatCompletion": ...
    async def _completion_wrapper(self, **kwargs: object) -> "Completion": ...
    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: object) -> TokensAndLogprobs: ...
    async def _resumable_wrapper(self, draft: Draft, **kwargs: object) -> TokensAndLogprobs: ...
    async def _get_logprobs_wrapper(self, **kwargs: object) -> JsonObject: ...


Attempt = Callable[[Asker, GenerationRequest], Awaitable[Result]]


class OneByOne:
    """Asks for responses one by one and keeps them in the journal of the run."""

    def __init__(
        self,
        journal: ResponseJournal,
        *,
        streams: bool,
        seed: int | None,
        evaluations: bool = False,
        earlier: EarlierRollouts | None = None,
    ) -> None:
        """
        Args:
            streams: journal responses in the making, where the engine can continue them.
            seed: every response gets its own seed, derived from this and its name; None: no seed is sent unless the
                caller gives one.
            evaluations: keep the responses of evaluations, too.
            earlier: rollouts of another run, whose responses are used first; only where ids are asked for.
        """
        self._journal = journal
        self._streams = streams
        self._seed = seed
        self._evaluations = evaluations
        self._earlier = earlier

    @classmethod
    def of_run(cls, journal: ResponseJournal, settings: BaseEnvConfig) -> Self:
        """As the settings of an environment say."""
        folder = settings.reuse_rollouts
        return cls(
            journal,
            streams=settings.response_journal == "tokens",
            seed=settings.response_seed,
            earlier=EarlierRollouts(expand_path(folder, what="env.reuse_rollouts")) if folder else None,
        )

    def applies(self, request: GenerationRequest) -> bool:
        """Tell if a request belongs to something whose responses are kept."""
        is_kept = self._evaluations or request.split == "train"
        work = current_work.get()
        return is_kept and work is not None and not work.is_settled

    async def chat(self, server: Asker, request: GenerationRequest) -> "ChatCompletion":
        made = await self._openai(
            server, _CHATS, lambda one, asked: one._chat_completion_wrapper(**asked.options), request, parse_chat
        )
        return join_choices(made)

    async def completion(self, server: Asker, request: GenerationRequest) -> "Completion":
        made = await self._openai(
            server, _TEXTS, lambda one, asked: one._completion_wrapper(**asked.options), request, parse_completion
        )
        return join_choices(made)

    async def tokens(self, server: Asker, request: GenerationRequest) -> TokensAndLogprobs:

        async def ask(draft: Draft, one: GenerationRequest) -> None:
            with held_replies() as replies:
                if self._streams:
                    result = await server._request(lambda at, asked: at._resumable_wrapper(draft, **asked.options), one)
                else:
                    result = await server._request(
                        lambda at, asked: at._tokens_and_logprobs_completion_wrapper(**asked.options), one
                    )
            prompt_ids, (ids,), (logprobs,), (reason,) = result
            reply = replies[-1] if replies else EngineReply([finish_reason_of(reason)], len(prompt_ids), len(ids))
            if draft.ids.tolist() != ids[: len(draft.ids)]:
                draft.restart()
            draft.grow(ids, logprobs, base=0, version=reply.weight_version, is_over=True)
            draft.finish(reply, prompt_ids=prompt_ids)

        drafts = await self._drafts(server, _TOKENS, request, ask)
        return (
            drafts[0].prompt_ids.tolist(),
            [draft.ids.tolist() for draft in drafts],
            [draft.logprobs.tolist() for draft in drafts],
            [_reply_of(draft).finish_reasons[0] for draft in drafts],
        )

    async def prompt_logprobs(self, server: Asker, request: GenerationRequest) -> JsonObject:

        async def ask(draft: Draft, one: GenerationRequest) -> None:
            with held_replies() as replies:
                view = await server._request(lambda at, asked: at._get_logprobs_wrapper(**asked.options), one)
            reply = replies[-1] if replies else EngineReply([], len(view["prompt_tokens"]), 0)
            draft.finish(reply, body=msgspec.msgpack.encode(view))  # unlike JSON it keeps -inf

        (draft,) = await self._drafts(server, _LOGPROBS, request.of(n=1), ask)
        return msgspec.msgpack.decode(draft.body or b"")

    def kept(self, name: str) -> bytes | None:
        """Return what lies under this name for the item that is rolled out here; None: nothing."""
        work = current_work.get()
        return None if work is None else self._journal.open(work.key, _named(name)).body

    def keep(self, name: str, body: bytes, reply: EngineReply) -> None:
        """Keep something until the item's group is recorded.

        Args:
            reply: the sum of the engine's replies in it.
        """
        work = current_work.get()
        if work is not None and not work.is_settled:
            self._journal.open(work.key, _named(name)).finish(reply, body=body)

    async def _openai(
        self,
        server: Asker,
        route: str,
        attempt: Attempt[Choices],
        request: GenerationRequest,
        parse: Callable[[bytes], Parsed[Choices]],
    ) -> list[Choices]:
        async def ask(draft: Draft, one: GenerationRequest) -> None:
            with held_replies() as replies:
                result = await server._request(attempt, one)
            reply = replies[-1] if replies else reply_facts(result, one.options, server.config.base_url or "")
            draft.finish(reply, body=orjson.dumps(result.model_dump(mode="json", warnings=False)))

        return [parse(draft.body or b"").result for draft in await self._drafts(server, route, request, ask)]

    async def _drafts(
        self,
        server: Asker,
        route: str,
        request: GenerationRequest,
        ask: Callable[[Draft, GenerationRequest], Awaitable[None]],
    ) -> list[Draft]:
        """Return the finished responses to one request, in order; those that are known already are not asked for."""
        work = current_work.get()
        assert work is not None
        digest, row = digest_of(route, server.config.model_name, request.options), row_with_own_responses()
        if row is not None:
            digest = hashlib.blake2b(digest + row.to_bytes(PLACE_BYTES, "big"), digest_size=16).digest()
        places = _places(work, digest, request.n)
        seed: int | None = request.options.get("seed", self._seed)

        async def finished(place: bytes) -> Draft | RolloutFault:
            draft = self._journal.open(work.key, place)
            if draft.reply is None and not draft.ids and route == _TOKENS:
                self._recall(draft, server.config.model_name, request)
            if draft.reply is None:
                one = request.of(n=1)
                if seed is not None:
                    one = one.of(seed=seed_of(seed, work.key, place))
                try:
                    await ask(draft, one)
                except RolloutFault as fault:  # the others continue: the next try finds them finished
                    return fault
            return draft

        results = await all_or_none([finished(place) for place in places])
        raise_first(results)
        drafts = [result for result in results if isinstance(result, Draft)]
        trace = current_trace()
        if trace is not None:
            replies = [_reply_of(draft) for draft in drafts]
            versions = oldest_first(reply.weight_version for reply in replies)  # a restart may lie between them
            for index, (reply, version) in enumerate(zip(replies, versions, strict=True)):
                told = replace(reply, weight_version=version)
                trace.record(further_part(told) if index else told)
        return drafts

    def _recall(self, draft: Draft, model: str, request: GenerationRequest) -> None:
        """Take the response from an earlier run, if it gave one to the same request."""
        if self._earlier is None:
            return
        row, index = row_with_own_responses(), draft.index
        if row is not None and index:  # its other choices of the same request: the earlier run has one for each row
            return
        found = self._earlier.find(
            draft.item_key,
            index if row is None else row,
            model=model,
            input_ids=request.input_ids,
            asked=request.options,
        )
        if found is not None:
            self._journal.reused_responses += 1
            self._journal.reused_tokens += len(found.ids)
            draft.recall(found.prompt_ids, found.ids, found.logprobs, found.reply)


def digest_of(route: str, model: str, options: Mapping[str, object]) -> bytes:
    """Digest what is asked, in 16 bytes: route, model, prompt and sampling parameters, but not how many responses."""
    asked = {key: value for key, value in options.items() if key not in _NAMES_NOTHING and value is not None}
    if "input_ids" in asked:
        asked.pop("prompt", None)  # the same in words
    text = orjson.dumps(
        [route, model, asked],
        default=repr,
        option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY,
    )
    return hashlib.blake2b(text, digest_size=16).digest()


def seed_of(seed: int, item_key: str, place: bytes) -> int:
    """Return a seed of 31 bits for one response of one item; the same after a restart."""
    name = f"{seed}/{item_key}/".encode() + place
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big") >> 1


def _places(work: Work, digest: bytes, n: int) -> list[bytes]:
    """Names of the next n responses to the same request within this try."""
    first = work.asked[digest]
    work.asked[digest] += n
    return [digest + index.to_bytes(PLACE_BYTES, "big") for index in range(first, first + n)]


def _named(name: str) -> bytes:
    """Return a name for the journal that no response has."""
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"kept").digest() + bytes(PLACE_BYTES)


def _reply_of(draft: Draft) -> EngineReply:
    assert draft.reply is not None
    return draft.reply
