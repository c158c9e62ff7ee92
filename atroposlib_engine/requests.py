"""From the body of `/generate` to checked sequences. Whatever could hurt the engine is refused here with a sentence."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from atroposlib.errors import RequestFault
from atroposlib.type_definitions import Json
from atroposlib_engine.engine import Engine
from atroposlib_engine.generation import Generation, LogprobWish
from atroposlib_engine.sampling import SamplingParams, parse_sampling


@dataclass(frozen=True)
class GenerateRequest:
    """A parsed `/generate` body: prompt by prompt, n sequences each."""

    generations: list[Generation]
    is_single: bool  # one prompt and n = 1: the reply is an object, otherwise a flat list
    stream: bool
    text_in_logprobs: bool


def parse_generate(body: object, engine: Engine) -> GenerateRequest:
    """Sequences of one `/generate` call.

    Raises:
        RequestFault: SGLang's sentence where it has one.
    """
    if not isinstance(body, dict):
        raise RequestFault(f"the body must be a JSON object, got {type(body).__name__}.")
    text, ids = body.get("text"), body.get("input_ids")
    if text is None and ids is None:
        raise RequestFault("Either text, input_ids or input_embeds should be provided.")
    if text is not None and ids is not None:
        raise RequestFault("Both text and input_ids are given; give one.")
    prompts, is_batch = encode_prompts(text if text is not None else ids, engine)
    count = len(prompts)
    params = [parse_sampling(raw) for raw in _per_prompt(body.get("sampling_params"), count, "sampling_params")]
    rids = [_rid(raw) for raw in _per_prompt(body.get("rid"), count, "rid")]
    if is_batch and isinstance(body.get("rid"), str):
        rids = [f"{rid}_{at}" for at, rid in enumerate(rids)]
    wishes = [
        LogprobWish(
            output=bool(wanted),
            prompt_from=integer(start, "logprob_start_len", -1),
            top=integer(top, "top_logprobs_num") if wanted else 0,
        )
        for wanted, start, top in zip(
            _per_prompt(body.get("return_logprob", False), count, "return_logprob"),
            _per_prompt(body.get("logprob_start_len", -1), count, "logprob_start_len"),
            _per_prompt(body.get("top_logprobs_num", 0), count, "top_logprobs_num"),
            strict=True,
        )
    ]
    generations = [
        generation
        for prompt, param, rid, wish in zip(prompts, params, rids, wishes, strict=True)
        for generation in build_generations(engine, prompt, param, wish, rid)
    ]
    return GenerateRequest(
        generations=generations,
        is_single=not is_batch and params[0].n == 1,
        stream=bool(body.get("stream")),
        text_in_logprobs=bool(body.get("return_text_in_logprobs")),
    )


def build_generations(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, wish: LogprobWish, rid: str | None
) -> list[Generation]:
    """The n sequences of one prompt, checked against vocabulary and context."""
    _check_ids(prompt, engine, "input_ids")
    _check_ids(params.stop_token_ids or (), engine, "stop_token_ids")
    _check_ids([int(token) for token in params.logit_bias or ()], engine, "logit_bias")
    max_new_tokens = check_length(len(prompt), params.max_new_tokens, engine.llama.context)
    if not 0 <= wish.top <= engine.llama.vocabulary.size:
        raise RequestFault(f"top_logprobs_num must be 0 to {engine.llama.vocabulary.size}, got {wish.top}.")
    if wish.prompt_from >= len(prompt):
        raise RequestFault(f"logprob_start_len {wish.prompt_from} is not below the input's {len(prompt)} tokens.")
    if not wish.output:
        wish = LogprobWish()
    ends = frozenset() if params.ignore_eos else engine.llama.vocabulary.end_ids
    own = rid or uuid.uuid4().hex
    return [
        Generation(
            rid=own if params.n == 1 else f"{own}_{index}" if rid else uuid.uuid4().hex,
            prompt=list(prompt),
            params=params,
            max_new_tokens=max_new_tokens,
            stop_ids=ends | frozenset(params.stop_token_ids or ()),
            wish=wish,
            index=index,
        )
        for index in range(params.n)
    ]


def encode_prompts(source: object, engine: Engine) -> tuple[list[list[int]], bool]:
    """Ids of a text, of ids, or of a list of either, and whether it was such a list."""
    if isinstance(source, str):
        return [engine.llama.vocabulary.encode(source)], False
    if not isinstance(source, list) or not source:
        raise RequestFault(f"the prompt must be a text, token ids or a list of these, got {str(source)[:80]}.")
    if all(isinstance(part, str) for part in source):
        return [engine.llama.vocabulary.encode(part) for part in source], True
    if all(isinstance(part, list) for part in source):
        return source, True
    return [source], False


def check_length(prompt_tokens: int, max_new_tokens: int | None, context: int) -> int:
    """Return how many tokens may be generated; RequestFault when prompt and completion do not fit in the context."""
    if prompt_tokens == 0:
        raise RequestFault("The input is empty; at least one token is needed.")
    if prompt_tokens >= context:
        raise RequestFault(
            f"The input ({prompt_tokens} tokens) is longer than the model's context length ({context} tokens)."
        )
    if max_new_tokens is None:
        return context - prompt_tokens
    total = prompt_tokens + max_new_tokens
    if total > context:
        raise RequestFault(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {total} tokens: {prompt_tokens} tokens from the input messages and {max_new_tokens} tokens for "
            "the completion. Please reduce the number of tokens in the input messages or the completion to fit within "
            "the limit."
        )
    return max_new_tokens


def _check_ids(ids: Sequence[object], engine: Engine, what: str) -> None:
    size = engine.llama.vocabulary.size
    for at, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < size:
            raise RequestFault(
                f"{what}[{at}] is {token!r}; token ids of this model are integers from 0 to {size - 1}. "
                "Was the prompt made with another model's tokenizer?"
            )


def _per_prompt(value: Json, count: int, what: str) -> list[Json]:
    """One value for every prompt: a list is taken prompt by prompt, anything else is repeated."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestFault(f"{what} has {len(value)} entries for {count} prompts.")
    return value


def _rid(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestFault(f"rid must be a string, got {value!r}.")
    return value


def integer(value: object, what: str, default: int = 0) -> int:
    """An integer of a body; True and False are none."""
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestFault(f"{what} must be an integer, got {value!r}.")
    return value
