"""SGLang's reply objects, as recorded from version 0.5.11: names, order, nulls and cumulative streams."""

from atroposlib.type_definitions import JsonObject
from atroposlib_engine.generation import Generation, TopLogprobs
from atroposlib_engine.llama import Vocabulary


def generate_reply(generation: Generation, vocabulary: Vocabulary, *, text_in_logprobs: bool = False) -> JsonObject:
    """One object of `/generate`, finished or so far."""
    return {
        "text": visible_text(generation, vocabulary),
        "output_ids": generation.output,
        "meta_info": _meta_info(generation, vocabulary, text_in_logprobs),
    }


def finish_reason(generation: Generation) -> JsonObject | None:
    """`meta_info.finish_reason`: null while it runs."""
    finish = generation.finish
    if finish is None:
        return None
    if finish.kind == "length":
        return {"type": "length", "length": generation.max_new_tokens}
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def visible_text(generation: Generation, vocabulary: Vocabulary) -> str:
    """The completion's text, cut before a stop string or stop token unless `no_stop_trim`.

    While it runs, bytes that do not yet make a character are held back.
    """
    params, finish, ids = generation.params, generation.finish, generation.output
    trims = finish is not None and finish.kind == "stop" and not params.no_stop_trim
    if trims and finish is not None and isinstance(finish.matched, int):
        ids = ids[:-1]
    raw = b"".join(vocabulary.token_bytes(token, special=not params.skip_special_tokens) for token in ids)
    if finish is None:
        raw = complete_characters(raw)
    text = raw.decode("utf-8", "replace")
    if trims and finish is not None and isinstance(finish.matched, str):
        text = text[: text.find(finish.matched)] if finish.matched in text else text
    return text


def complete_characters(raw: bytes) -> bytes:
    """`raw` without an unfinished UTF-8 character at its end.

    >>> complete_characters("é".encode()[:1])
    b''
    """
    for back in range(1, min(4, len(raw) + 1)):
        byte = raw[-back]
        if byte >= 0xC0:  # a leading byte: how many bytes does its character have?
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return raw if back >= needed else raw[:-back]
        if byte < 0x80:
            return raw
    return raw


def _meta_info(generation: Generation, vocabulary: Vocabulary, text_in_logprobs: bool) -> JsonObject:
    def entry(logprob: float | None, token: int) -> list[object]:
        text = vocabulary.decode([token], special=True) if text_in_logprobs else None
        return [logprob, token, text]

    def top_entry(best: TopLogprobs | None) -> list[list[object]] | None:
        return None if best is None else [entry(logprob, token) for logprob, token in best]

    meta: JsonObject = {
        "id": generation.rid,
        "finish_reason": finish_reason(generation),
        "prompt_tokens": len(generation.prompt),
        "weight_version": generation.weight_version,
        "total_retractions": generation.retractions,
        "queue_time": 0.0,
        "prefill_waiting_latency": None,
        "prefill_launch_latency": None,
    }
    if generation.first_weight_version != generation.weight_version:
        meta["weight_version_start"] = generation.first_weight_version  # SGLang does not say it
    wish = generation.wish
    if wish.output:
        scored = generation.prompt[wish.prompt_from :] if wish.prompt_from >= 0 else []
        prompt_logprobs = generation.prompt_logprobs or [None] * len(scored)
        meta["input_token_logprobs"] = [entry(*pair) for pair in zip(prompt_logprobs, scored, strict=False)]
        pairs = zip(generation.logprobs, generation.output, strict=False)
        meta["output_token_logprobs"] = [entry(*pair) for pair in pairs]
        meta["output_token_logprobs_length"] = len(generation.logprobs)
        if wish.top:
            meta["input_top_logprobs"] = [top_entry(best) for best in generation.prompt_top]
            meta["output_top_logprobs"] = [top_entry(best) for best in generation.top]
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": generation.completion_tokens,
        "cached_tokens": generation.cached_tokens,
        "cached_tokens_details": {"device": generation.cached_tokens, "host": 0} if generation.cached_tokens else None,
        "dp_rank": None,
    }
    if generation.finished_at is not None:
        meta |= _timing(generation, generation.finished_at)
    return meta


def _timing(generation: Generation, finished_at: float) -> JsonObject:
    decoding = finished_at - (generation.first_token_at or finished_at)
    return {
        "e2e_latency": finished_at - generation.received_at,
        "request_received_ts": generation.received_at,
        "api_server_dispatch_finish_ts": generation.received_at,
        "request_finished_ts": finished_at,
        "inference_time": decoding,
        "decode_throughput": generation.completion_tokens / decoding if decoding > 0 else 0.0,
        "response_sent_to_client_ts": finished_at,
    }
