"""Why one attempt at a request failed, seen from the wire, and so what to do next.

EngineFault                 the same request may succeed later
    EndpointUnavailable     wait for the endpoint
        OutOfQuota          and say at once what is missing
    ReplyFault              try again a few times
    DeadlineFault           do not try again
RequestFault                do not try again
    BadReply                ask again twice
"""

import json
import math
import time
from email.utils import parsedate_to_datetime

import orjson

from atroposlib.errors import EngineFault, RequestFault, RolloutFault
from atroposlib.type_definitions import Json

UNAVAILABLE = frozenset({408, 425, 429, 502, 503, 504, 529})
"""HTTP statuses that say nothing about the request: the endpoint takes none now."""


class EndpointUnavailable(EngineFault):
    """No connection, rate limit, or "not ready" (429, 502, 503, 504). Wait for the endpoint; costs no try.

    `retry_after_s` is the wait the server asked for, or None.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OutOfQuota(EndpointUnavailable):
    """The account behind the key has nothing left to pay with (402, or 429 with `insufficient_quota`)."""


class ReplyFault(EngineFault):
    """The endpoint failed on this request: 5xx, connection lost, unreadable reply. Try again a few times."""


class DeadlineFault(EngineFault):
    """No reply within the generation deadline. Trying again would only add load."""


MAX_BAD_REPLIES = 3
"""Requests for the same choices that are answered with something that cannot be used."""


class BadReply(RequestFault):
    """The endpoint is well, but what it answered cannot be used: half a surrogate pair, ids left out."""


_PAYMENT_REQUIRED, _TOO_MANY_REQUESTS = 402, 429


def fault_of_status(url: str, status: int, body: bytes, retry_after: str | None = None) -> RolloutFault:
    """The fault that a reply which is not 2xx stands for, with the server's words."""
    message = f"POST {url} answered {status}: {_error_message(body)}"
    if status == _PAYMENT_REQUIRED or (status == _TOO_MANY_REQUESTS and b"insufficient_quota" in body):
        return OutOfQuota(message)
    if status in UNAVAILABLE:
        return EndpointUnavailable(message, _seconds(retry_after))
    return ReplyFault(message) if status >= 500 else RequestFault(message)


def _seconds(retry_after: str | None) -> float | None:
    """The wait that a `Retry-After` header asks for, in seconds or until a date."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        try:
            seconds = max(0.0, parsedate_to_datetime(retry_after or "").timestamp() - time.time())
        except (ValueError, OverflowError):
            return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def fault_in_reply(url: str, reply: object) -> RolloutFault | None:
    """The fault that an error object in place of a reply stands for, as routers send it with status 200."""
    error = reply.get("error") if isinstance(reply, dict) else None
    if not error:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and code >= 400 else 500
    return fault_of_status(url, status, json.dumps(reply).encode())  # half surrogate pairs, as `read_json` takes them


def read_json(data: bytes) -> Json:
    """Read the JSON of a reply, NaN, infinities and half surrogate pairs included, which are no JSON but are sent.

    Raises:
        ReplyFault: it is something else.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise ReplyFault(f"reply is not JSON ({error}): {data[:200]!r}") from error


def _error_message(body: bytes) -> str:
    """The server's sentence out of the error shapes of SGLang, vLLM, OpenAI and FastAPI."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:500].decode("utf-8", "replace") or "(empty reply)"
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed)
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or error
        parsed = error
    return parsed if isinstance(parsed, str) else orjson.dumps(parsed)[:500].decode("utf-8", "replace")
