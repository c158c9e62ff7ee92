"""A request for generations, and its sampling parameters as SGLang and vLLM call them, checked before they are sent.

An unknown key is a 500 without a word from SGLang, and a token id outside the vocabulary ends the server. Both are
caught here and become a `RequestFault` that says what is wrong.
"""

import difflib
import logging
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np

from atroposlib.errors import RequestFault
from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request, from whoever asks to the wire; methods that authors override get `options` as keyword arguments.

    `options` are as they were given: keyword arguments of OpenAI's client, of the engines, and `split`.
    """

    options: JsonObject

    @property
    def n(self) -> int:
        """Choices wanted."""
        return self.options.get("n") or 1

    @property
    def split(self) -> str:
        """The pool of slots: "train" or "eval"."""
        return self.options.get("split", "train")

    @property
    def model(self) -> str | None:
        return self.options.get("model")

    @property
    def prompt(self) -> str | None:
        return self.options.get("prompt")

    @property
    def input_ids(self) -> list[int] | None:
        """Ids to continue [P]; they count, where a prompt is given, too. An agents' gateway gives a packed array."""
        return self.options.get("input_ids")

    @property
    def headers(self) -> dict[str, str] | None:
        return self.options.get("extra_headers")

    @property
    def timeout_s(self) -> float | None:
        """Longest wait for the reply; None: by the number of tokens."""
        timeout = self.options.get("timeout")
        return float(timeout) if isinstance(timeout, int | float) else None

    @property
    def top_k(self) -> int:
        """Number of candidates wanted for each position of a prompt, at least 1."""
        return max(1, self.options.get("top_k") or self.options.get("top_logprobs") or 1)

    def of(self, **changes: object) -> Self:
        return type(self)({**self.options, **changes})

    def without(self, *names: str) -> Self:
        return type(self)({key: value for key, value in self.options.items() if key not in names})

    def to_server(self, model: str) -> Self:
        """Return the same request as the server of this model gets it: `split` is ours alone."""
        options = {**self.options, "model": model}
        options.pop("split", None)
        return type(self)(options)

    def body(self) -> JsonObject:
        """Return the JSON for OpenAI's routes: `extra_body` merged in, what is not given and client options left out.

        Raises:
            RequestFault: `stream=True`; replies are read as a whole.
        """
        if self.options.get("stream"):
            raise RequestFault("stream=True is not supported; leave it out, the reply comes as a whole")
        body = {
            key: as_plain(value)
            for key, value in self.options.items()
            if is_given(value) and key not in ("extra_body", "extra_headers", "timeout", "stream")
        }
        return {**body, **(self.options.get("extra_body") or {})}


TOKEN_LIMITS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
"""Names of the limit of new tokens per choice."""


def max_tokens_of(body: Mapping[str, Json]) -> int | None:
    """Return the limit of new tokens per choice in a request, under any of its names."""
    for name in TOKEN_LIMITS:
        if isinstance(body.get(name), int):
            return body[name]
    return None


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SGLANG_SAMPLING = words(
    """max_new_tokens min_new_tokens n temperature top_p top_k min_p frequency_penalty presence_penalty
    repetition_penalty stop stop_token_ids stop_regex ignore_eos skip_special_tokens spaces_between_special_tokens
    no_stop_trim json_schema regex ebnf structural_tag custom_params stream_interval logit_bias sampling_seed"""
)
SGLANG_REQUEST = words(
    """rid image_data video_data audio_data logprob_start_len top_logprobs_num token_ids_logprob lora_path lora_id
    session_params custom_logit_processor return_hidden_states priority extra_key routing_key data_parallel_rank
    return_routed_experts"""
)
SGLANG_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "top_logprobs": "top_logprobs_num",
    "guided_regex": "regex",
    "guided_json": "json_schema",
}

VLLM_SAMPLING = words(
    """n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids bad_words include_stop_str_in_output ignore_eos max_tokens min_tokens logprobs prompt_logprobs
    detokenize skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens guided_decoding
    structured_outputs logit_bias allowed_token_ids extra_args"""
)
VLLM_NAMES = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

_CLIENT_ONLY = words(
    """model messages prompt input_ids timeout extra_headers extra_body stream user logprobs tools tool_choice
    skip_reasoning"""
)
OPTIONS = SGLANG_SAMPLING | SGLANG_REQUEST | VLLM_SAMPLING | SGLANG_NAMES.keys() | VLLM_NAMES.keys() | _CLIENT_ONLY
"""Whatever one of the engines, or our clients, can be told."""

AGENT_OPTIONS = (SGLANG_SAMPLING | VLLM_SAMPLING | SGLANG_NAMES.keys() | VLLM_NAMES.keys()) - words(
    """custom_params extra_args stream_interval skip_special_tokens spaces_between_special_tokens no_stop_trim best_of
    detokenize include_stop_str_in_output truncate_prompt_tokens logprobs prompt_logprobs top_logprobs
    guided_decoding"""
)
"""An agent may ask for these: what is drawn and where it stops, not what is sent or recorded."""

GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""Grammars by SGLang's names, with those inside vLLM's `structured_outputs` (0.11 and later)."""

_NOT_GIVEN_TYPES = ("NotGiven", "Omit")  # by name: importing `openai` takes 0.6 s of CPU


def sampling_of(
    options: Mapping[str, Json], *, names: Mapping[str, str], allowed: frozenset[str], engine: str
) -> JsonObject:
    """Options of a request as the engine's own parameters.

    Client options and what is not given are left out, `extra_body` is merged in, `names` translates OpenAI's names.

    Raises:
        RequestFault: a key that the engine does not know.
    """
    asked = {**options, **(options.get("extra_body") or {})}
    sampling: JsonObject = {}
    for key, value in asked.items():
        if key in _CLIENT_ONLY or not is_given(value):
            continue
        name = names.get(key, key)
        if name not in allowed:
            raise RequestFault(unknown_key(key, allowed | names.keys(), engine))
        sampling[name] = as_plain(value)
    return sampling


def is_given(value: object) -> bool:
    """Neither None nor one of the official client's words for it: `NOT_GIVEN`, `omit`."""
    return value is not None and type(value).__name__ not in _NOT_GIVEN_TYPES


def as_plain(value: object) -> Json:
    """NumPy's scalars and arrays as Python's: what was asked is journalled, too."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def unknown_key(key: str, known: Collection[str], engine: str) -> str:
    """Return the sentence about an unknown sampling parameter, with the nearest known one."""
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"{engine} does not know the sampling parameter {key!r}; {hint}"


_LEAST = {"max_tokens": 1, "n": 1, "temperature": 0, "top_p": 0}


def check_sampling(given: Mapping[str, Json]) -> None:
    """RequestFault where a parameter that every engine has is of the wrong kind."""
    for key, least in _LEAST.items():
        value, kinds = given.get(key), int if key in ("max_tokens", "n") else int | float
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value < least):
            raise RequestFault(f"{key} is {value!r:.100}; it must be a number of at least {least}")
    stop = given.get("stop")
    if stop is not None and not set(map(type, stop if isinstance(stop, list) else [stop])) <= {str}:
        raise RequestFault(f"stop is {stop!r:.100}; it must be a text or a list of texts")


def known_options(given: JsonObject, allowed: frozenset[str] = OPTIONS | {"split"}) -> JsonObject:
    """`given` without what is not allowed: OpenAI's clients send much that is meant for OpenAI only."""
    unknown = given.keys() - allowed
    for key in unknown:
        _note_ignored(key)
    return {key: value for key, value in given.items() if key not in unknown}


@lru_cache(maxsize=1000)
def _note_ignored(key: str) -> None:
    logger.warning("request field ignored, no engine knows it: %s", key)


def checked_ids(ids: list[int], vocabulary: int | None) -> list[int]:
    """Prompt ids that are safe to send.

    Args:
        ids: [P], or packed as an array of "i", which costs next to nothing.
        vocabulary: number of ids the engine knows; None when unknown, then only the sign is checked.

    Raises:
        RequestFault: empty, or an id outside the vocabulary (SGLang would end with a device-side assert).
    """
    if len(ids) == 0:
        raise RequestFault("the prompt has no tokens; give at least one")
    end = 2**31 if vocabulary is None else vocabulary  # beyond are the negative ids of a packed array
    try:
        packed = ids if isinstance(ids, array) and ids.typecode == "i" else array("I", ids)
        is_known = int(np.frombuffer(packed, np.uint32).max()) < end  # faster than max() of a long prompt
    except OverflowError:  # negative, or beyond 32 bits
        is_known = False
    except TypeError as error:
        raise RequestFault(f"prompt ids must be integers ({error}); give input_ids as a list of them") from error
    if not is_known:
        bad = next(i for i, token in enumerate(ids) if not 0 <= token < end)
        raise RequestFault(
            f"prompt token {bad} is id {ids[bad]}, outside the vocabulary of {end} ids; "
            "does tokenizer_name belong to the served model?"
        )
    return ids


def drop_doubled_bos(ids: list[int], bos_token_id: int | None) -> list[int]:
    """`ids` without the first of two leading BOS: template and tokenizer may each have added one."""
    if bos_token_id is not None and ids[:2] == [bos_token_id, bos_token_id]:
        return ids[1:]
    return ids
