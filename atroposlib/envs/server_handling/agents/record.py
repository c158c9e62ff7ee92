"""The record of a rollout, and its place on disk: one JSON line for each event, so that nothing is lost by a kill.

A call is written as what it adds to the call before it: ids, log-probabilities, and the messages that are new. Lines
are whole or cut off: a torn end is what a kill left, and nobody was told of it.
"""

import contextlib
import hashlib
import heapq
import logging
import os
import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Self

import msgspec
import orjson

from atroposlib.envs.server_handling.conversation import Conversation, Message, Turn, keys_of
from atroposlib.envs.server_handling.managed_server import ManagedServer, Reply
from atroposlib.envs.server_handling.sequence import Call
from atroposlib.errors import PathError
from atroposlib.lock_files import HeldError, hold
from atroposlib.paths import check_replaceable
from atroposlib.rollouts.files import AppendFile
from atroposlib.rollouts.trace import EngineReply
from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

LEFT_OUT_BYTES = 64 * 1024 * 1024
"""So much of deleted rollouts may always stay in a file."""
PIECE_BYTES = 256 * 1024
PAUSE_S = 0.002
"""A file is copied in such pieces, with such pauses, so that the gateway keeps answering."""


_REPLIES = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}


def name_of(prefix: str, rollout_id: str, number: int, part: str = "") -> str:
    """Return the id of an exchange's reply or a part of it, the same whenever it is asked for again."""
    text = f"{rollout_id}/{number}/{part}"
    return f"{prefix}{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"


def reply_id(rollout_id: str, dialect: str, number: int) -> str:
    """Return the id of a reply, in the form of its API; it names the call."""
    return name_of(_REPLIES[dialect], rollout_id, number)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of a reply, whatever dialect it is written in."""

    message: Message  # of the assistant, in OpenAI's chat form, thoughts as `reasoning_content`
    finish_reason: str  # stop, length, tool_calls
    prompt_tokens: int
    completion_tokens: int

    @classmethod
    def of(cls, reply: Reply) -> Self:
        """Take what an agent gets of a reply."""
        return cls(reply.message, reply.finish_reason, reply.prompt_tokens, len(reply.call.output))


@dataclass(slots=True)
class Exchange:
    """One request of the agent and what was replied."""

    number: int
    digest: bytes  # of the request
    dialect: str
    asked: JsonObject  # sampling parameters as the agent sent them, with its name for the model
    used: JsonObject  # sampling parameters as the engine got them
    started: float  # seconds since the epoch
    ended: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # empty for a text of our own
    versions: list[str | None] = field(default_factory=list)  # of the weights, in the order of the engine's replies
    notes: list[str] = field(default_factory=list)  # of what was left out or overridden

    def place_calls(self) -> None:
        """Tell the calls where they are, once the exchange has its number."""
        for index, call in enumerate(self.calls):
            call.place = self.number, index


class _Head(msgspec.Struct):
    """The part of a line that says what it is about."""

    rollout: str
    forgotten: bool = False


@dataclass(slots=True)
class _Lines:
    """The lines of one rollout."""

    starts: "array[int]" = field(default_factory=lambda: array("q"))  # bytes from the beginning of the file
    size: int = 0  # bytes of all of them

    def note(self, start: int, size: int) -> None:
        self.starts.append(start)
        self.size += size


class CallLog:
    """One file, with one process that writes it. It knows where the lines of each rollout are: 8 bytes a line.

    Raises:
        PathError: another process writes it, or a line of it is none of ours.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = hold(path.with_suffix(".lock"), mode=0o600)
        except HeldError as error:
            raise PathError(
                f"{path} is written by process {error.pid}; give every gateway a file of its own"
            ) from error
        self._path, self._lines = path, dict[str, _Lines]()
        self._kept = 0  # bytes of all these lines
        self._copy: _Copy | None = None  # without deleted rollouts, which shall take the place of the file
        self._copied_from = 0  # bytes; a shorter file is not copied
        self._file = AppendFile(path)
        try:
            _copy_of(path).unlink(missing_ok=True)  # a kill left it
            self._find_lines()
        except BaseException:
            self.close()
            raise

    def append(self, event: JsonObject) -> None:
        """Write one event; OSError: it is not in the file, and nobody may be told of it."""
        if self._copy is not None and self._copy.is_over:  # first, as it may have taken the last room on the disk
            self._replace()
        start = self._file.size
        self._file.write(orjson.dumps(event, default=repr, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS))
        self._note(event["rollout"], start, self._file.size - start)

    def events(self, rollout: str | None = None) -> Iterator[JsonObject]:
        """Read what is not forgotten, in order; with `rollout` only what is of it, and nothing else of the file."""
        wanted = self._lines.values() if rollout is None else [self._lines.get(rollout, _Lines())]
        with self._path.open("rb") as file:
            for start in sorted(start for lines in wanted for start in lines.starts):
                file.seek(start)
                yield orjson.loads(file.readline())

    def forget(self, rollout: str) -> None:
        """Leave out a rollout from now on; OSError: it is still known.

        Where more than half of the file (and `LEFT_OUT_BYTES`) is of such rollouts, a thread copies it without them,
        and one of the next events puts the copy in its place.
        """
        self.append({"forgotten": True, "rollout": rollout})
        self._drop(rollout)
        left_out = self._file.size - self._kept
        if self._copy is None and left_out > max(self._kept, LEFT_OUT_BYTES) and self._file.size >= self._copied_from:
            self._copy = _Copy(self._path, self._file.size, self._lines)
            self._copy.thread.start()

    def close(self) -> None:
        if self._copy is not None:
            self._copy.discard()
        self._file.close()
        os.close(self._lock)

    def _note(self, rollout: str, start: int, size: int) -> None:
        self._lines.setdefault(rollout, _Lines()).note(start, size)
        self._kept += size

    def _drop(self, rollout: str) -> None:
        self._kept -= self._lines.pop(rollout, _Lines()).size

    def _find_lines(self) -> None:
        """Read the file once; what a kill left of a line is cut off."""
        start, decoder = 0, msgspec.json.Decoder(_Head)
        with self._path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    logger.warning("a line that a kill cut off is dropped: file=%s bytes=%d", self._path, len(line))
                    os.truncate(self._path, start)
                    self._file.size = start
                    return
                try:
                    head = decoder.decode(line)
                except msgspec.DecodeError as error:
                    raise PathError(
                        f"{self._path} has a line at byte {start} that is no record of a rollout ({error}); name "
                        "another file, or take that line out"
                    ) from error
                if head.forgotten:
                    self._drop(head.rollout)
                else:
                    self._note(head.rollout, start, len(line))
                start += len(line)

    def _replace(self) -> None:
        """Put the copy and all that came since in the place of the file, in one step: a kill leaves one of them."""
        assert self._copy is not None
        copy, self._copy = self._copy, None
        try:
            file = copy.put_in_place(self._file.size)
        except (OSError, PathError) as error:
            logger.warning("records of deleted rollouts stay in the file: file=%s error=%s", self._path, error)
            self._copied_from = self._file.size + LEFT_OUT_BYTES
            copy.discard()
            return
        replaced, self._file = self._file, file
        for rollout, lines in self._lines.items():
            lines.starts = copy.places_of(rollout, lines.starts)
        threading.Thread(target=_close, args=[replaced], daemon=True).start()  # freeing gigabytes takes a second


def _close(file: AppendFile) -> None:
    with contextlib.suppress(OSError):  # all of it is in the copy
        file.close()


def _copy_of(path: Path) -> Path:
    return path.with_name(path.name + ".new")


class _Copy:
    """A copy of a file without its deleted rollouts, made by a thread while the file grows.

    Of the lines that are there at the start it has those of known rollouts; all that came since follows as it is,
    deletions too.
    """

    def __init__(self, path: Path, size: int, lines: dict[str, _Lines]) -> None:
        self._path, self._size = path, size
        self._known = [(rollout, one.starts[:]) for rollout, one in lines.items()]
        self._places: dict[str, array[int]] = {}  # of these lines in the copy
        self._moved = 0  # bytes from the place of a later line to its place in the copy
        self._error: Exception | None = None
        self._discarded = threading.Event()
        self.is_over = False  # finished, or failed
        self.thread = threading.Thread(target=self._run, name=f"copying {path.name}", daemon=True)

    def put_in_place(self, size: int) -> AppendFile:
        """Return it in the place of the file, which now has this many bytes; OSError, PathError: it is not there."""
        if self._error is not None:
            raise self._error
        check_replaceable(self._path)
        copy = AppendFile(_copy_of(self._path))
        try:
            self._moved = copy.size - self._size
            with self._path.open("rb") as old:
                old.seek(self._size)
                copy.write(old.read(size - self._size))
            os.replace(copy.path, self._path)
        except BaseException:
            copy.close()
            raise
        copy.path = self._path
        return copy

    def places_of(self, rollout: str, starts: "array[int]") -> "array[int]":
        """Return the places of a rollout's lines in the copy, by those in the file."""
        later = bisect_left(starts, self._size)
        places = self._places[rollout] if later else array("q")  # an id may have been used again
        places.extend(start + self._moved for start in starts[later:])
        return places

    def discard(self) -> None:
        """Stop the thread, and leave nothing of the copy."""
        self._discarded.set()
        self.thread.join()
        with contextlib.suppress(OSError):  # the next start removes it
            _copy_of(self._path).unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            with self._path.open("rb") as old, _copy_of(self._path).open("wb") as new:
                os.fchmod(new.fileno(), os.fstat(old.fileno()).st_mode)
                piece = 0  # bytes
                for start, rollout in heapq.merge(*(zip(starts, repeat(rollout)) for rollout, starts in self._known)):
                    old.seek(start)
                    self._places.setdefault(rollout, array("q")).append(new.tell())
                    piece += new.write(old.readline())
                    if piece >= PIECE_BYTES:
                        piece = 0
                        if self._discarded.wait(PAUSE_S):
                            return
                new.flush()
                os.fsync(new.fileno())
        except Exception as error:  # raised by `put_in_place`
            self._error = error
        self.is_over = True


class RolloutLog:
    """The events of one rollout, in a call log where there is one."""

    def __init__(self, log: CallLog | None, rollout: str) -> None:
        self._log, self._rollout = log, rollout
        self._owed: list[JsonObject] = []  # could not be written yet, in order

    @property
    def is_kept(self) -> bool:
        return self._log is not None

    def write(self, *events: JsonObject) -> None:
        """Write events behind those that could not be; OSError: those that are left come with the next."""
        if self._log is None:
            return
        self._owed += [{**event, "rollout": self._rollout} for event in events]
        while self._owed:
            self._log.append(self._owed[0])
            del self._owed[0]

    def exchanges(self) -> list[JsonObject]:
        events = self._log.events(self._rollout) if self._log is not None else ()
        return [event["exchange"] for event in events if "exchange" in event]


class FinishedRollout(msgspec.Struct):
    """A rollout with its score, as it is kept until its group is written."""

    id: str
    score: float
    exchanges: list[JsonObject]  # as `written`
    replies: list[EngineReply]

    def packed(self) -> bytes:
        """As bytes; log-probabilities stay what they are, infinities too."""
        return msgspec.msgpack.encode(self, enc_hook=repr)

    @classmethod
    def unpacked(cls, body: bytes) -> "FinishedRollout":
        return msgspec.msgpack.decode(body, type=cls)


def written(exchange: Exchange) -> JsonObject:
    """Return an exchange as JSON values."""
    return {
        "number": exchange.number,
        "digest": exchange.digest.hex(),
        "dialect": exchange.dialect,
        "asked": exchange.asked,
        "used": exchange.used,
        "started": exchange.started,
        "ended": exchange.ended,
        "versions": exchange.versions,
        "notes": exchange.notes,
        "answers": [asdict(answer) for answer in exchange.answers],
        "calls": [_call(call) for call in exchange.calls],
    }


def _call(call: Call) -> JsonObject:
    chat = call.chat
    new = () if chat is None else chat.turns[call.turns :]
    return {
        "parent": call.parent.place if call.parent is not None else None,
        "inserted": list(call.inserted),
        "output": list(call.output),
        "logprobs": list(call.logprobs),
        "rest": call.rest,
        "text": call.text,
        "tail": call.tail,
        "finish_reason": call.finish_reason,
        "turns": call.turns,
        "new": None if chat is None else [[turn.said, turn.shown] for turn in new],
        "tools": None if chat is None else chat.tools,
    }


def restored(line: JsonObject, earlier: Sequence[Exchange], managed: ManagedServer) -> Exchange:
    """Return the exchange that was written; its calls take their places in the lineage of `managed`."""
    answers = [Answer(**answer) for answer in line["answers"]]
    exchange = Exchange(
        **{key: line[key] for key in ("number", "dialect", "asked", "used", "started", "ended", "versions", "notes")},
        digest=bytes.fromhex(line["digest"]),
        answers=answers,
    )
    for entry, answer in zip(line["calls"], answers, strict=False):
        place = entry["parent"]
        parent = earlier[place[0]].calls[place[1]] if place is not None else None
        chat = None
        if entry["new"] is not None:
            kept = parent.chat.turns[: entry["turns"]] if parent is not None and parent.chat is not None else ()
            turns = [Turn(said, shown, _keys(said, shown)) for said, shown in entry["new"]]
            chat = Conversation((*kept, *turns), entry["tools"])
        own = ("inserted", "output", "logprobs", "rest", "text", "finish_reason", "turns")
        call = Call(parent=parent, chat=chat, tail=tuple(entry["tail"]), **{key: entry[key] for key in own})
        exchange.calls.append(call)
        if parent is not None:
            parent.is_continued = True
        if chat is not None:
            managed.lineage.add(call, answer.message)
    exchange.place_calls()
    return exchange


def _keys(said: JsonObject, shown: JsonObject | None) -> tuple[Json, ...]:
    return keys_of(said if shown is None or said.get("role") == "assistant" else shown)
