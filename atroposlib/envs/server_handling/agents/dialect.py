"""The common part of the APIs that agents speak: a request is understood, a reply written, at once or as events.

Events are made of the whole reply: what is streamed is what is recorded.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import orjson

from atroposlib.envs.server_handling.agents.record import Exchange
from atroposlib.envs.server_handling.agents.rollouts import Asked, Rollout
from atroposlib.envs.server_handling.proxy_schemas import known_options
from atroposlib.errors import RequestFault

_ROLE = methodcaller("get", "role")

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: pure functions between its JSON and ours."""

    name: str
    parse: Callable[[Body, Rollout], Asked]  # RequestFault: what is wrong with the request
    reply: Callable[[Exchange, Body, Rollout], dict[str, Any]]
    events: Callable[[dict[str, Any], Body], Iterator[bytes]]  # of a reply
    error: Callable[[int, str, str], dict[str, Any]]  # status, sentence, kind
    keep_alive: bytes  # an event that says nothing


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + (data if isinstance(data, bytes) else orjson.dumps(data)) + b"\n\n"


def name_of(prefix: str, rollout: Rollout, exchange: Exchange, part: str = "") -> str:
    """An id of a reply or a part of it, the same whenever it is asked for again."""
    text = f"{rollout.id}/{exchange.number}/{part}"
    return f"{prefix}{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"


def objects(value: Any, what: str) -> Sequence[dict[str, Any]]:
    """A list of objects, or what is wrong with it."""
    if not isinstance(value, list) or not set(map(type, value)) <= {dict}:
        raise RequestFault(f"{what} must be a list of objects, not {value!r:.100}")
    return value


def object_of(value: Any, what: str) -> Mapping[str, Any]:
    """An object, empty where nothing was given; RequestFault for anything else."""
    if value is not None and not isinstance(value, dict):
        raise RequestFault(f"{what} must be an object, not {value!r:.100}")
    return value or {}


def sampling_of(body: Body, names: Mapping[str, str], ignored: frozenset[str]) -> dict[str, Any]:
    """The sampling parameters of a request under the engines' names, checked.

    Args:
        names: of this API, with that of the engines.
        ignored: what is no sampling parameter.
    """
    given = {names.get(key, key): value for key, value in body.items() if key not in ignored and value is not None}
    sampling = known_options(given)
    for key, kinds, lowest in (
        ("max_tokens", (int,), 1),
        ("n", (int,), 1),
        ("temperature", (int, float), 0),
        ("top_p", (int, float), 0),
    ):
        value = sampling.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value < lowest):
            raise RequestFault(f"{key} is {value!r:.100}; it must be a number of at least {lowest}")
    stop = sampling.get("stop")
    if stop is not None and not (isinstance(stop, str) or all(isinstance(one, str) for one in stop)):
        raise RequestFault(f"stop is {stop!r:.100}; it must be a text or a list of texts")
    return sampling


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages that each have a role; RequestFault otherwise."""
    checked = list(objects(messages, "messages"))
    if not checked:
        raise RequestFault("messages must not be empty")
    if set(map(type, map(_ROLE, checked))) != {str}:  # of a long history without a loop in Python
        index = next(index for index, message in enumerate(checked) if not isinstance(message.get("role"), str))
        raise RequestFault(f"messages[{index}] has no role; give each message one, such as 'user'")
    return checked
