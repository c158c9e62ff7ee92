"""OpenAI's forms: result types from reply bytes or made here, and a client of that shape for a managed server.

The `openai` package costs 0.6 s of CPU to import. It is imported while the first request is on its way.
"""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

import orjson

from atroposlib.envs.server_handling.faults import ReplyFault, fault_in_reply, read_json
from atroposlib.rollouts.trace import EngineReply, finish_reason_of
from atroposlib.type_definitions import Json, JsonObject

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

logger = logging.getLogger(__name__)
_PROCESS, _numbers = os.urandom(12).hex(), count()  # ids of replies: a system call for each would be dear
Result = TypeVar("Result", "ChatCompletion", "Completion")

_NOT_SAMPLING = frozenset({"model", "messages", "prompt", "tools", "tool_choice"})


@dataclass(frozen=True, slots=True)
class Parsed(Generic[Result]):
    """A reply without the choices that cannot be used, and what is wrong with those."""

    result: Result
    given: int  # choices in the reply
    flaws: list[str]


def parse_chat(data: bytes, url: str = "") -> "Parsed[ChatCompletion]":
    """A chat reply. Content that a reasoning parser left null becomes "", so that callers can treat it as text.

    Raises:
        RolloutFault: it is an error object or no reply at all.
    """
    return _parse(data, url, _types()[0], is_chat=True)


def parse_completion(data: bytes, url: str = "") -> "Parsed[Completion]":
    """A text completion reply; null text becomes "". Faults as `parse_chat`."""
    return _parse(data, url, _types()[1], is_chat=False)


def warm_up() -> None:
    """Import and build the result types in a thread, so that the first reply finds them."""
    Thread(target=lambda: (chat_of([Made("", "stop")], ""), completion_of([Made("", "stop")], "")), daemon=True).start()


class Made(NamedTuple):
    """One choice of a reply that is made here."""

    text: str
    finish_reason: str
    prompt_tokens: int = 0  # the same for all choices, and counted once
    completion_tokens: int = 0


def chat_of(results: Sequence[Made], model: str) -> "ChatCompletion":
    choices = [
        {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": made.text}}
        for i, made in enumerate(results)
    ]
    return _made(_types()[0], "chat.completion", choices, results, model)


def completion_of(results: Sequence[Made], model: str) -> "Completion":
    choices = [{"index": i, "finish_reason": "stop", "text": made.text} for i, made in enumerate(results)]
    return _made(_types()[1], "text_completion", choices, results, model)


def join_choices(results: "list[Result]") -> "Result":
    """All choices in the first result, numbered in order; the prompt is counted once."""
    first = results[0]
    for result in results[1:]:
        first.choices.extend(result.choices)  # type: ignore[arg-type]
        if first.usage is not None and result.usage is not None:
            first.usage.completion_tokens += result.usage.completion_tokens
            first.usage.total_tokens += result.usage.completion_tokens
    for index, choice in enumerate(first.choices):
        choice.index = index
    return first


def reply_facts(result: "ChatCompletion | Completion", body: Mapping[str, Json], base_url: str) -> EngineReply:
    """Take from a reply what the trace keeps."""
    usage = result.usage
    metadata = getattr(result, "metadata", None)  # SGLang only; OpenAI declares the field for chats
    return EngineReply(
        finish_reasons=[finish_reason_of(choice.finish_reason) for choice in result.choices],
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
        model=result.model or body.get("model"),
        base_url=base_url,
        weight_version=metadata.get("weight_version") if isinstance(metadata, dict) else None,
        sampling={key: value for key, value in body.items() if key not in _NOT_SAMPLING},
    )


def usage_of(choices: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Sum the tokens of choices, each with those of its prompt, which counts once, and its own."""
    prompt, completion = max((given for given, _ in choices), default=0), sum(own for _, own in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _made(
    result_type: "type[Result]",
    kind: str,
    choices: list[JsonObject],
    results: Sequence[Made],
    model: str,
) -> "Result":
    """All choices are validated in one piece, which takes half the time of one by one."""
    header = {"id": f"{_PROCESS}{next(_numbers):08x}", "created": int(time.time()), "model": model, "object": kind}
    reply = result_type.model_validate(
        {**header, "choices": choices, "usage": usage_of([made[2:] for made in results])}
    )
    for choice, made in zip(reply.choices, results, strict=True):
        if made.finish_reason != choice.finish_reason:
            # not checked: engines know more reasons than OpenAI
            choice.finish_reason = made.finish_reason  # pyright: ignore[reportAttributeAccessIssue]
    return reply


def _parse(data: bytes, url: str, result_type: "type[Result]", *, is_chat: bool) -> "Parsed[Result]":
    parsed = read_json(data)
    if fault := fault_in_reply(url, parsed):
        raise fault
    if not isinstance(parsed, dict) or not isinstance(parsed.get("choices"), list):
        raise ReplyFault(f"reply has no choices: {data[:500]!r}")
    given, flaws = parsed["choices"], []
    parsed["choices"] = usable = []
    for choice in given:
        if wrong := _flaw(choice, is_chat=is_chat):
            flaws.append(f"{wrong}: {choice!a:.300}")
        else:
            said, key = (choice["message"], "content") if is_chat else (choice, "text")
            if said.get(key) is None and not (is_chat and said.get("tool_calls")):
                said[key] = ""
            usable.append(choice)
    usage = parsed.get("usage")
    if isinstance(usage, dict):
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            usage[name] = usage[name] if isinstance(usage.get(name), int) else 0
    else:
        parsed["usage"] = None
    return Parsed(_build(result_type, parsed), len(given), flaws)


def _flaw(choice: object, *, is_chat: bool) -> str | None:
    """Why a choice cannot be used; None when it can."""
    if not isinstance(choice, dict):
        return "it is no object"
    if choice.get("finish_reason") == "error" or choice.get("error"):
        return "the provider behind the router failed"
    try:
        orjson.dumps(choice)
    except TypeError as error:  # half a surrogate pair
        return f"it is no text ({error})"
    return "it has no message" if is_chat and not isinstance(choice.get("message"), dict) else None


def _build(result_type: "type[Result]", parsed: JsonObject) -> "Result":
    """Checked if it can be, else as it is: servers send finish reasons that OpenAI does not know."""
    from pydantic import ValidationError

    try:
        return result_type.model_validate(parsed)
    except ValidationError:
        return result_type.construct(**parsed)


@cache
def _types() -> "tuple[type[ChatCompletion], type[Completion]]":
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

    return ChatCompletion, Completion


class ManagedServerAdapter:
    """`.chat.completions.create` and `.completions.create`; everything else is refused."""

    def __init__(self, managed_server: Any, base_url: str) -> None:
        self.base_url = base_url
        self.chat = SimpleNamespace(completions=_route(managed_server.chat_completion))
        self.completions = _route(managed_server.completion)

    async def post(self, path: str, body: object, cast_to: type) -> NoReturn:
        """Not available: only the two routes above are tracked."""
        raise NotImplementedError(f"a managed server has no route {path!r}; use chat.completions or completions")

    def copy(self, **kwargs: object) -> NoReturn:
        """Not available: options of a client mean nothing here."""
        raise NotImplementedError("a managed server's client cannot be copied with other options")


def _route(call: Callable[..., Awaitable[object]]) -> SimpleNamespace:
    async def create(**kwargs: object) -> object:
        """As OpenAI's `create`; `model` is the server's."""
        kwargs.pop("model", None)
        return await call(**kwargs)

    return SimpleNamespace(create=create)
