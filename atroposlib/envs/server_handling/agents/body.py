"""The body of a request: JSON whose messages are mostly those of the request before, which are not parsed again.

What is read is what parsing the whole body gives: the bytes up to the end of the last message are the same, and what
follows is parsed. Where that is in doubt (a field that comes twice), the whole body is.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from xxhash import xxh3_128_digest

from atroposlib.envs.server_handling.conversation import MOST_RECENT, GrownMessages
from atroposlib.errors import RequestFault


@dataclass(frozen=True, slots=True)
class ReadBody:
    """The body of a request, and in its bytes the messages: from the first to behind the last, and those as a list."""

    fields: dict[str, Any]
    data: bytes
    start: int = 0
    end: int = 0

    @classmethod
    def of(cls, data: bytes, fields: dict[str, Any]) -> "ReadBody":
        """Find the messages in a body that was parsed; an empty place where they cannot be told from the rest."""
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            return cls(fields, data)
        array = _messages_in(data)
        fields["messages"] = GrownMessages(messages)
        if array is None or data.count(array) != 1:  # a field that comes twice
            return cls(fields, data)
        first = data.index(array)
        return cls(fields, data, first + 1, first + len(array[:-1].rstrip(_WHITE)))


@dataclass(frozen=True, slots=True)
class _Beginning:
    """All bytes of a request up to the end of its last message."""

    digest: bytes
    start: int  # of the first message
    end: int
    messages: GrownMessages

    def of(self, data: bytes) -> ReadBody | None:
        """A body that begins with these bytes: only what is new is parsed; None for any other, or where in doubt."""
        if len(data) <= self.end or xxh3_128_digest(memoryview(data)[: self.end]) != self.digest:
            return None
        rest = data[self.end :].lstrip(_WHITE)
        is_longer = rest.startswith(b",")
        new = data[: self.start] + (rest[1:] if is_longer else rest)
        try:
            fields = orjson.loads(new)
        except orjson.JSONDecodeError:  # the whole body is read for what is wrong with it
            return None
        array, place = _messages_in(new), self.start - 1
        if array is None or not new.startswith(array, place) or new.count(array) != 1:
            return None
        if bool(fields["messages"]) != is_longer:  # a comma without a message
            return None
        fields["messages"] = messages = GrownMessages([*self.messages, *fields["messages"]])
        messages.known, messages.before = len(self.messages), self.messages
        end = len(data) - len(new) + place + len(array[:-1].rstrip(_WHITE)) if is_longer else self.end
        return ReadBody(fields, data, self.start, end)


class BodyReader:
    """Reads the bodies of one rollout's requests. What begins with all messages of an earlier one is not read again."""

    def __init__(self) -> None:
        self._known: list[_Beginning] = []  # the last first

    def read(self, data: bytes) -> ReadBody:
        """Read one; RequestFault unless it is a JSON object."""
        read = next((read for known in self._known if (read := known.of(data)) is not None), None)
        return read or ReadBody.of(data, json_object(data))

    def keep(self, read: ReadBody) -> None:
        """Know its messages from now on: they are such that a request may have."""
        if read.end:
            messages = read.fields["messages"]
            messages.before = None
            known = _Beginning(xxh3_128_digest(memoryview(read.data)[: read.end]), read.start, read.end, messages)
            others = (one for one in self._known if len(one.messages) != messages.known)
            self._known = [known, *others][:MOST_RECENT]


class _HasMessages(msgspec.Struct):
    messages: msgspec.Raw


_decoder = msgspec.json.Decoder(_HasMessages)
_WHITE = b" \t\n\r"


def _messages_in(data: bytes) -> bytes | None:
    """Return the bytes of a body's messages; None without any."""
    try:
        return bytes(_decoder.decode(data).messages)
    except msgspec.DecodeError:
        return None


def json_object(data: bytes) -> dict[str, Any]:
    """Parse the body of a request; RequestFault unless it is a JSON object."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestFault(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestFault(f"the body must be a JSON object, not {type(body).__name__}")
    return body
