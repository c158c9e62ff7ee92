"""A request for n responses as n requests for one, so that each is kept as soon as it is finished.

A response is named by the digest of what is asked and by its place: the i-th response to the same request within one
try of an item has place i, whether it was asked for by one request of n or by n requests of one. Responses to equal
requests are exchangeable, so it does not matter which of several concurrent callers gets which place.

Asking again only for what was not finished favours short answers a little, as long ones are more often cut off by a
kill; with streams (SGLang) the tokens that were there are continued instead, and nothing is drawn twice.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, Self

import msgspec
import orjson

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.server_handling.fan_out import all_or_none, raise_first
from atroposlib.envs.server_handling.openai_wire import join_choices, parse_chat, parse_completion, reply_facts
from atroposlib.envs.server_handling.sampling import GenerationRequest
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.errors import RolloutFault
from atroposlib.paths import expand_path
from atroposlib.rollouts.journal import PLACE_BYTES, Draft, EarlierRollouts, ResponseJournal
from atroposlib.rollouts.source import Work, current_work
from atroposlib.rollouts.trace import (
    EngineReply,
    current_trace,
    finish_reason_of,
    further_part,
    held_replies,
    oldest_first,
    row_with_own_responses,
)

_CHATS, _TOKENS = "_chat_completion_wrapper", "_tokens_and_logprobs_completion_wrapper"
_LOGPROBS = "_get_logprobs_wrapper"
_ROUTES = {_TOKENS: "tokens"}
"""Methods by their part in the names of journalled responses and of their seeds, where it is another: never changed."""

_NAMES_NOTHING = frozenset({"n", "timeout", "extra_headers", "seed"})


class Asker(Protocol):
    """The part of `APIServer` that sends one request and tries it again."""

    config: APIServerConfig

    async def _request(self, method: str, request: GenerationRequest, *given: object) -> Any: ...


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

    def applies(self, method: str, request: GenerationRequest) -> bool:
        """Tell if a request belongs to something whose responses are kept."""
        is_kept = method != _LOGPROBS if request.split == "train" else self._evaluations
        work = current_work.get()
        return is_kept and work is not None and not work.is_settled

    async def answer(self, server: Asker, method: str, request: GenerationRequest) -> Any:
        """Return what a method of an `APIServer` would, of responses that are kept."""
        drafts = await self._drafts(server, method, request)
        if method == _LOGPROBS:
            return msgspec.msgpack.decode(drafts[0].body or b"")
        if method == _TOKENS:
            return (
                drafts[0].prompt_ids.tolist(),
                [draft.ids.tolist() for draft in drafts],
                [draft.logprobs.tolist() for draft in drafts],
                [_reply_of(draft).finish_reasons[0] for draft in drafts],
            )
        parse = parse_chat if method == _CHATS else parse_completion
        made: list[Any] = [parse(draft.body or b"").result for draft in drafts]
        return join_choices(made)

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

    async def _ask(self, server: Asker, method: str, draft: Draft, one: GenerationRequest) -> None:
        """Ask for one response, and put it into its draft; an author's own server may have told no reply."""
        with held_replies() as replies:
            if method == _TOKENS and self._streams:
                result = await server._request("_resumable_wrapper", one, draft)
            else:
                result = await server._request(method, one)
        reply = replies[-1] if replies else None
        if method == _TOKENS:
            prompt_ids, (ids,), (logprobs,), (reason,) = result
            reply = reply or EngineReply([finish_reason_of(reason)], len(prompt_ids), len(ids))
            if draft.ids.tolist() != ids[: len(draft.ids)]:
                draft.restart()
            draft.grow(ids, logprobs, base=0, version=reply.weight_version, is_over=True)
            draft.finish(reply, prompt_ids=prompt_ids)
        elif method == _LOGPROBS:
            body = msgspec.msgpack.encode(result)  # unlike JSON it keeps -inf
            draft.finish(reply or EngineReply([], len(result["prompt_tokens"]), 0), body=body)
        else:
            reply = reply or reply_facts(result, one.options, server.config.base_url or "")
            draft.finish(reply, body=orjson.dumps(result.model_dump(mode="json", warnings=False)))

    async def _drafts(self, server: Asker, method: str, request: GenerationRequest) -> list[Draft]:
        """Return the finished responses to one request, in order; those that are known already are not asked for."""
        work = current_work.get()
        assert work is not None
        route, row = _ROUTES.get(method, method), row_with_own_responses()
        digest = digest_of(route, server.config.model_name, request.options)
        if row is not None:
            digest = hashlib.blake2b(digest + row.to_bytes(PLACE_BYTES, "big"), digest_size=16).digest()
        places = _places(work, digest, 1 if method == _LOGPROBS else request.n)
        seed: int | None = request.options.get("seed", self._seed)

        async def finished(place: bytes) -> Draft | RolloutFault:
            draft = self._journal.open(work.key, place)
            if draft.reply is None and not draft.ids and method == _TOKENS:
                self._recall(draft, server.config.model_name, request)
            if draft.reply is None:
                one = request.of(n=1)
                if seed is not None:
                    one = one.of(seed=seed_of(seed, work.key, place))
                try:
                    await self._ask(server, method, draft, one)
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
