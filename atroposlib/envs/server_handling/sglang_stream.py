"""SGLang's streams: a response in the making, read often enough to lose little and seldom enough to cost little.

Every event repeats the whole response so far (ids and log-probabilities are cumulative), so an event is parsed only
when about `PIECE_TOKENS` new tokens or `PIECE_S` seconds have come since the last one that was. What a broken
connection leaves unparsed is parsed then.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.faults import ReplyFault
from atroposlib.errors import RolloutFault
from atroposlib.rollouts.journal import PIECE_S, PIECE_TOKENS, Draft
from atroposlib.rollouts.trace import finish_reason_of
from atroposlib.type_definitions import PROMPT_LOGPROB

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.sglang_server import Generation

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


def is_resumable(body: Mapping[str, Any]) -> bool:
    """Whether prompt plus partial answer gives the same distribution as going on would.

    Not with penalties, grammars or stop strings, which look at what was generated before.
    """
    sampling = body["sampling_params"]
    if sampling.get("repetition_penalty") == 1:
        sampling = {key: value for key, value in sampling.items() if key != "repetition_penalty"}
    looks_back = any(sampling.get(key) not in _NEUTRAL for key in _DEPENDS_ON_OUTPUT)
    return not looks_back and body.keys() <= _PLAIN_REQUEST


def streamed(body: Mapping[str, Any], prompt_ids: list[int], draft: Draft, room: int | None) -> dict[str, Any]:
    """The request that goes on behind `draft`, with `room` new tokens left."""
    sampling = {**body["sampling_params"], "stream_interval": EVENT_TOKENS}
    if room is not None:
        sampling["max_new_tokens"] = room
    return {**body, "input_ids": prompt_ids + draft.ids.tolist(), "sampling_params": sampling, "stream": True}


class StreamReader:
    """Takes the events of one stream into a draft."""

    def __init__(self, draft: Draft, decode: Callable[[bytes], "list[Generation]"], url: str) -> None:
        self._draft = draft
        self._decode = decode
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
        (generation,) = self._decode(event)
        self.refusal = generation.refusal(self._url)
        ids, logprobs = generation.ids_and_logprobs()
        meta = generation.meta_info
        if len(ids) != meta.completion_tokens or len(logprobs) not in (0, len(ids)):
            raise ReplyFault(
                f"a /generate stream gave {len(ids)} ids and {len(logprobs)} log-probabilities for "
                f"{meta.completion_tokens} tokens; events must be "
                "cumulative: start the server without --stream-output"
            )
        self.version = meta.weight_version
        self._reason = meta.finish_reason
        logprobs = logprobs or [PROMPT_LOGPROB] * len(ids)  # later events may have them
        self._draft.grow(ids, logprobs, base=self._base, version=meta.weight_version, is_over=self.is_over)
        self._parsed_bytes, self._parsed_at = len(event), time.monotonic()
