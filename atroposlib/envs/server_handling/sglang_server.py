"""Client of SGLang's own `/generate`: ids in, ids and log-probabilities out, exactly as the engine had them.

Log-probabilities are of the distribution after temperature. Stop tokens stay in the ids. Choices come as one flat
list. The embedded engine speaks the same protocol.

A stream is read often enough to lose little and rarely enough to cost little: every event repeats the whole response so
far (ids and log-probabilities are cumulative), so an event is parsed only when about `PIECE_TOKENS` new tokens or
`PIECE_S` seconds have come since the last one that was. What a broken connection leaves unparsed is parsed then.
"""

import math
import time
from collections.abc import Mapping

import msgspec

from atroposlib.envs.server_handling.faults import (
    BadReply,
    ReplyFault,
    fault_in_reply,
    fault_of_status,
    read_json,
)
from atroposlib.envs.server_handling.sampling import (
    SGLANG_NAMES,
    SGLANG_REQUEST,
    SGLANG_SAMPLING,
    GenerationRequest,
    sampling_of,
)
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ReasoningConfig, TokensAndLogprobs
from atroposlib.envs.server_handling.server_config import resolve_openai_configs
from atroposlib.envs.server_handling.token_server import TokenServer
from atroposlib.errors import EngineFault, RolloutFault
from atroposlib.rollouts.journal import PIECE_S, PIECE_TOKENS, Draft
from atroposlib.rollouts.trace import EngineReply, finish_reason_of, further_part, oldest_first
from atroposlib.type_definitions import PROMPT_LOGPROB, Json, JsonObject

__all__ = ["APIServerConfig", "ReasoningConfig", "SGLangServer", "resolve_openai_configs"]


class TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """One generated (or scored) token; the first prompt token has no log-probability."""

    logprob: float | None
    token_id: int


class MetaInfo(msgspec.Struct):
    """The part of `meta_info` that is read."""

    finish_reason: JsonObject | str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    weight_version: str | None = None  # of the newest token
    weight_version_start: str | None = None  # of the oldest, where it is another one; the embedded engine says it
    output_token_logprobs: list[TokenLogprob] | None = None
    input_token_logprobs: list[TokenLogprob] | None = None
    input_top_logprobs: list[list[TokenLogprob] | None] | None = None

    @property
    def oldest_weights(self) -> str | None:
        """The version that counts, so that no reply counts as fresher than it is."""
        return self.weight_version_start or self.weight_version


class Generation(msgspec.Struct):
    """One choice of a `/generate` reply. `text` is not read: ids are the truth."""

    meta_info: MetaInfo
    output_ids: list[int] | None = None

    def ids_and_logprobs(self) -> tuple[list[int], list[float]]:
        """[T], [T]; `PROMPT_LOGPROB` where the engine gave no log-probability."""
        tokens = self.meta_info.output_token_logprobs or []
        known = (token.logprob for token in tokens)
        return self.output_ids or [], [
            PROMPT_LOGPROB if logprob is None or not math.isfinite(logprob) else logprob for logprob in known
        ]

    def flaw(self) -> str | None:
        """Why this cannot be used: tokens without ids, or log-probabilities of other tokens than the ids."""
        ids, tokens = self.output_ids, self.meta_info.output_token_logprobs
        if not ids:
            said = self.meta_info.completion_tokens
            return f"meta_info.completion_tokens is {said}, but output_ids is empty" if said else None
        if tokens and len(tokens) < len(ids):
            return f"output_ids has {len(ids)} tokens, but output_token_logprobs has {len(tokens)}"
        if tokens and [token.token_id for token in tokens[: len(ids)]] != ids:
            return f"output_ids and output_token_logprobs name different tokens: {ids[:20]} and {tokens[:20]}"
        return None

    def refusal(self, url: str) -> RolloutFault | None:
        """The fault that an abort with a status stands for, which is not one from outside."""
        reason = self.meta_info.finish_reason
        status = reason.get("status_code") if isinstance(reason, dict) and reason.get("type") == "abort" else None
        return fault_of_status(url, status, msgspec.json.encode(reason)) if isinstance(status, int) else None


_NEVER_UPDATED = "default"
_ALLOWED = SGLANG_SAMPLING | SGLANG_REQUEST
_decoder = msgspec.json.Decoder(Generation | list[Generation])


class SGLangServer(TokenServer):
    """One SGLang server (or router).

    Its prefix cache keeps what was computed with earlier weights where an update did not flush it. Requests therefore
    name the weights that answered last (`extra_key`): prefixes are shared only among requests that name the same.
    """

    _weights: str | None = None  # that answered last

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: object) -> TokensAndLogprobs:
        request = GenerationRequest(kwargs)
        prompt_ids = await self._prompt_ids(request)
        generations = await self._generate(prompt_ids, request)
        results = [generation.ids_and_logprobs() for generation in generations]
        self._note_generated([ids for ids, _ in results])
        reasons: list[str] = [finish_reason_of(generation.meta_info.finish_reason) for generation in generations]
        return prompt_ids, [ids for ids, _ in results], [logprobs for _, logprobs in results], reasons

    async def _get_logprobs_wrapper(self, **kwargs: object) -> JsonObject:
        """Top-k log-probabilities of the prompt; position 0 has none, so its lists are empty."""
        request = GenerationRequest(kwargs)
        prompt_ids = await self._prompt_ids(request)
        one = request.without("top_k").of(n=1, temperature=0, top_p=1.0, max_tokens=kwargs.get("max_tokens") or 1)
        (generation,) = await self._generate(prompt_ids, one.of(top_logprobs=request.top_k, logprob_start_len=0))
        top = generation.meta_info.input_top_logprobs
        if top is None:
            raise ReplyFault(f"{self.root_url}/generate gave no input_top_logprobs although they were asked for")
        given = generation.meta_info.input_token_logprobs or []
        return {
            "prompt_tokens": prompt_ids,
            "prompt_logprobs": [entry.logprob for entry in given],
            "prompt_topk_token_ids": [[entry.token_id for entry in entries or []] for entries in top],
            "prompt_topk_logprobs": [[entry.logprob for entry in entries or []] for entries in top],
        }

    async def _resumable_wrapper(self, draft: Draft, **kwargs: object) -> TokensAndLogprobs:
        """One generation behind what `draft` holds, which grows while the tokens come."""
        request = GenerationRequest(kwargs)
        prompt_ids = await self._prompt_ids(request)
        body = await self._body(prompt_ids, request)
        if not is_resumable(body):
            return await self._tokens_and_logprobs_completion_wrapper(**kwargs)
        url, base, limit = f"{self.root_url}/generate", len(draft.ids), body["sampling_params"].get("max_new_tokens")
        reason: object = "length"
        if limit is None or base < limit:
            reader = StreamReader(draft, url)
            rest = None if limit is None else limit - base
            try:
                await self._stream(url, streamed(body, prompt_ids, draft, rest), request, rest, reader.take)
            except EngineFault:
                reader.note()
                if not reader.is_over:
                    raise  # else the whole response is there, and only the end of the stream is missing
            finally:
                reader.note()
            reason = reader.finish_reason()
            if reader.refusal is not None:
                raise reader.refusal
            self._answered_with(reader.version)
        self._record(
            EngineReply(
                finish_reasons=[finish_reason_of(reason)],
                prompt_tokens=len(prompt_ids),
                completion_tokens=len(draft.ids),
                model=request.model,
                base_url=self.root_url,
                weight_version=draft.version,  # of the oldest token, so that no reply counts as fresher than it is
                sampling=body["sampling_params"],
            )
        )
        ids = draft.ids.tolist()
        self._note_generated([ids])
        return prompt_ids, [ids], [draft.logprobs.tolist()], [finish_reason_of(reason)]

    async def _generate(self, prompt_ids: list[int], request: GenerationRequest) -> list[Generation]:
        body = await self._body(prompt_ids, request)
        sampling = body["sampling_params"]
        url = f"{self.root_url}/generate"
        wanted = sampling.get("n", 1)
        data = await self._post(url, body, request, sampling.get("max_new_tokens"))
        generations = decode_generations(data, url)
        if refusals := [refusal for each in generations if (refusal := each.refusal(url))]:
            raise refusals[0]
        flaws = [flaw for each in generations if (flaw := each.flaw())]
        if flaws or len(generations) != wanted:
            raise BadReply(f"{url} gave {flaws[0] if flaws else f'{len(generations)} generations for n={wanted}'}")
        for index, reply in enumerate(_facts(generations, request, sampling, self.root_url)):
            self._record(further_part(reply) if index else reply)
        self._answered_with(oldest_first(each.meta_info.weight_version for each in generations)[-1])
        return generations

    async def _body(self, prompt_ids: list[int], request: GenerationRequest) -> JsonObject:
        asked = sampling_of(request.options, names=SGLANG_NAMES, allowed=_ALLOWED, engine="SGLang")
        sampling = {key: value for key, value in asked.items() if key in SGLANG_SAMPLING}
        if "max_new_tokens" not in sampling:  # SGLang would stop after 128
            room = await self._room_for(len(prompt_ids))
            sampling |= {} if room is None else {"max_new_tokens": room}
        body = {
            "input_ids": prompt_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "return_text_in_logprobs": False,
            **{key: value for key, value in asked.items() if key in SGLANG_REQUEST},
        }
        return body | self._cache_key(body)

    def _cache_key(self, asked: Mapping[str, object]) -> JsonObject:
        if self._weights in (None, _NEVER_UPDATED):
            return {}
        return {"extra_key": f"{asked.get('extra_key', '')} weights {self._weights}"}

    def _answered_with(self, weights: str | None) -> None:
        self._weights = weights or self._weights


def decode_generations(data: bytes, url: str) -> list[Generation]:
    """The choices of a `/generate` reply of `url`, one or a flat list, each with its `output_ids`."""
    try:
        decoded = _decoder.decode(data)
    except msgspec.DecodeError as error:  # NaN and infinities are no JSON, but are sent
        reply = read_json(data)
        if fault := fault_in_reply(url, reply):
            raise fault from None
        try:
            decoded = msgspec.convert(reply, Generation | list[Generation])
        except (msgspec.ValidationError, UnicodeError):
            raise BadReply(f"not a /generate reply ({error}): {data[:200]!r}") from error
    generations = decoded if isinstance(decoded, list) else [decoded]
    for generation in generations:
        if generation.output_ids is None:  # an old server: ids are in the pairs only
            generation.output_ids = [token.token_id for token in generation.meta_info.output_token_logprobs or ()]
    return generations


def _facts(
    generations: list[Generation], request: GenerationRequest, sampling: JsonObject, base_url: str
) -> list[EngineReply]:
    """One for all choices; where the weights changed between them one for each, oldest weights first."""
    infos = [generation.meta_info for generation in generations]
    versions = oldest_first(info.oldest_weights for info in infos)
    parts = [infos] if versions[0] == versions[-1] else [[info] for info in infos]
    return [
        EngineReply(
            finish_reasons=[finish_reason_of(info.finish_reason) for info in part],
            prompt_tokens=part[0].prompt_tokens,
            completion_tokens=sum(info.completion_tokens for info in part),
            model=request.model,
            base_url=base_url,
            weight_version=version,
            sampling=sampling,
        )
        for part, version in zip(parts, versions, strict=False)
    ]


EVENT_TOKENS = PIECE_TOKENS // 2
"""Tokens the engine is asked to collect for each event."""
_TOKEN_BYTES = 24  # of an event: id twice, log-probability, brackets

_DEPENDS_ON_OUTPUT = (
    *("min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "custom_params"),
    *("stop", "stop_regex", "no_stop_trim", "json_schema", "regex", "ebnf", "structural_tag"),
)
_NEUTRAL = (None, 0, 0.0, [], "", False)
_PLAIN_REQUEST = frozenset(
    {
        *("input_ids", "sampling_params", "return_logprob", "return_text_in_logprobs"),
        *("priority", "lora_path", "lora_id", "extra_key"),
    }
)


def is_resumable(body: Mapping[str, Json]) -> bool:
    """Tell if prompt plus partial answer gives the same distribution as continuing would.

    Not with penalties, grammars or stop strings, which look at what was generated before.
    """
    sampling = body["sampling_params"]
    if sampling.get("repetition_penalty") == 1:
        sampling = {key: value for key, value in sampling.items() if key != "repetition_penalty"}
    looks_back = any(sampling.get(key) not in _NEUTRAL for key in _DEPENDS_ON_OUTPUT)
    return not looks_back and body.keys() <= _PLAIN_REQUEST


def streamed(body: Mapping[str, Json], prompt_ids: list[int], draft: Draft, room: int | None) -> JsonObject:
    """The request that continues behind `draft`, with `room` new tokens left."""
    sampling = {**body["sampling_params"], "stream_interval": EVENT_TOKENS}
    if room is not None:
        sampling["max_new_tokens"] = room
    return {**body, "input_ids": [*prompt_ids, *draft.ids], "sampling_params": sampling, "stream": True}


class StreamReader:
    """Takes the events of one stream into a draft."""

    def __init__(self, draft: Draft, url: str) -> None:
        self._draft = draft
        self._base = len(draft.ids)
        self._last: bytes = b""  # the newest event that is not parsed
        self._parsed_bytes = 0
        self._parsed_at = time.monotonic()
        self._reason: object = None
        self._url = url
        self.refusal: RolloutFault | None = None
        self.version = draft.version

    def take(self, event: bytes) -> None:
        """One event; `[DONE]` ends the stream."""
        if event == b"[DONE]":
            return
        self._last = event
        is_much = len(event) - self._parsed_bytes >= PIECE_TOKENS * _TOKEN_BYTES
        if is_much or time.monotonic() - self._parsed_at >= PIECE_S:
            self._parse(event)

    def note(self) -> None:
        """Take what is not parsed yet, and journal it when the stream broke off or the engine aborted it."""
        if self._last:
            self._parse(self._last)
        if not self.is_over:
            self._draft.save(self.version)

    def finish_reason(self) -> object:
        """Why the engine stopped; ReplyFault when the stream ended without saying so."""
        if self._reason is None:
            raise ReplyFault(f"a /generate stream ended after {len(self._draft.ids)} tokens without a finish reason")
        return self._reason

    @property
    def is_over(self) -> bool:
        """The engine came to an end of its own."""
        return self._reason is not None and finish_reason_of(self._reason) != "abort"

    def _parse(self, event: bytes) -> None:
        self._last = b""
        generations = decode_generations(event, self._url)
        if len(generations) != 1:
            raise ReplyFault(f"a /generate stream gave {len(generations)} generations in one event: {event[:200]!r}")
        generation = generations[0]
        self.refusal = generation.refusal(self._url)
        ids, logprobs = generation.ids_and_logprobs()
        meta = generation.meta_info
        if len(ids) != meta.completion_tokens or len(logprobs) not in (0, len(ids)):
            raise ReplyFault(
                f"a /generate stream gave {len(ids)} ids and {len(logprobs)} log-probabilities for "
                f"{meta.completion_tokens} tokens; events must be "
                "cumulative: start the server without --stream-output"
            )
        if flaw := generation.flaw():
            raise ReplyFault(f"a /generate stream gave a bad event: {flaw}")
        self.version = meta.weight_version
        self._reason = meta.finish_reason
        logprobs = logprobs or [PROMPT_LOGPROB] * len(ids)  # later events may have them
        self._draft.grow(ids, logprobs, base=self._base, version=meta.oldest_weights, is_over=self.is_over)
        self._parsed_bytes, self._parsed_at = len(event), time.monotonic()
