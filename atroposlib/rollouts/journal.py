"""Responses of unfinished groups on disk, so that a restart continues with them instead of asking again.

A response is named by its item, a digest of what was asked, and how often the item asked it before. It is written as
pieces: a whole answer is one piece, a streamed one has a piece every `PIECE_TOKENS` tokens or `PIECE_S` seconds.

    X.journal.1, X.journal.2, ...    segments of framed pieces: length, CRC, msgpack; a torn end is ignored

A process appends only to segments it began itself. A piece is dead when its group is recorded or given up; a segment
without a living piece is removed, so the files hold little more than what is in flight. The journal saves work and
decides nothing: when it cannot be written (full disk), the run continues without it.
"""

import logging
import re
import struct
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import orjson

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.rollouts.files import AppendFile, FileGoneError
from atroposlib.rollouts.ledger import REJECTED, LedgerEntry, read_entries, read_line
from atroposlib.rollouts.locations import RunFiles
from atroposlib.rollouts.trace import EngineReply
from atroposlib.type_definitions import IGNORE_INDEX, Json, JsonObject

logger = logging.getLogger(__name__)

PIECE_TOKENS, PIECE_S = 128, 2.0
SEGMENT_BYTES = 64 << 20
PLACE_BYTES = 4
"""At the end of a sample's name: how many responses to the same request come before, big-endian."""

_FRAME = struct.Struct("<II")  # payload bytes, CRC-32 of the payload


class Piece(msgspec.Struct, array_like=True):
    """Tokens of one response that came since its previous piece; `reply` makes it the last one."""

    item_key: str
    sample: bytes
    start: int = 0  # tokens before this piece; what an abandoned attempt wrote behind them does not count
    ids: bytes = b""  # int32 each
    logprobs: bytes = b""  # float64 each
    version: str | None = None  # weights that generated the piece
    prompt_ids: bytes = b""  # int32 each, in the last piece
    reply: EngineReply | None = None
    body: bytes | None = None  # an OpenAI-style reply, as JSON


class _Place(NamedTuple):
    segment: int
    start: int
    size: int


class ResponseJournal:
    """The journal of one run. Its writer must hold the run's lock; all calls come from one event loop."""

    def __init__(self, base: Path, done: Container[str]) -> None:
        """Read what earlier processes left, and remove what belongs to items that are `done`."""
        self._base = base  # `X.journal`; segments are `X.journal.<number>`
        self._places: dict[str, dict[bytes, list[_Place]]] = {}  # item key -> sample -> its pieces
        self._drafts: dict[str, dict[bytes, Draft]] = {}  # item key -> sample -> the one draft that may write
        self._living: Counter[int] = Counter()  # segment -> living pieces
        self.reused_responses = self.reused_tokens = 0  # by this process
        numbers = sorted(self._segments())
        for number in numbers:
            self._load(number, done)
        self._number = numbers[-1] if numbers else 0
        self._file: AppendFile | None = None
        self._is_failing = False

    def open(self, item_key: str, sample: bytes) -> "Draft":
        """The response of this name as far as it is known; an earlier draft of it can write no more."""
        draft = Draft(self, item_key, sample)
        for place in self._places.get(item_key, {}).get(sample, ()):
            piece = self._read(place)
            if piece is None or piece.start > len(draft.ids):  # what follows a gap is another response
                draft = Draft(self, item_key, sample)
            else:
                draft.take(piece)
        self._drafts.setdefault(item_key, {})[sample] = draft
        if draft.ids or draft.reply:
            self.reused_responses += max(1, len(draft.reply.finish_reasons)) if draft.reply is not None else 0
            self.reused_tokens += len(draft.ids) or (draft.reply.completion_tokens if draft.reply else 0)
        return draft

    def settle(self, item_key: str) -> None:
        """The item's group is recorded, or it will have none: its responses are not needed any more."""
        self._drafts.pop(item_key, None)
        for places in self._places.pop(item_key, {}).values():
            for place in places:
                self._living[place.segment] -= 1
        for number in [number for number, living in self._living.items() if not living]:
            if number != self._number or self._file is None:
                self._remove(number)

    def write(self, draft: "Draft", piece: Piece) -> None:
        """Append one piece, unless another draft of the same response was opened since."""
        drafts = self._drafts.get(piece.item_key, {})
        if drafts.get(piece.sample) is not draft:
            return
        payload = msgspec.msgpack.encode(piece)
        frame = _FRAME.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            end = self._append(frame)
        except OSError as error:
            if not self._is_failing:
                logger.warning("responses are not journalled for now: file=%s error=%s", self._base, error)
            self._is_failing = True
            if isinstance(error, FileGoneError):
                self.close()  # the next response begins a new segment
            del drafts[piece.sample]  # a later piece would leave a gap
            return
        self._is_failing = False
        place = _Place(self._number, end - len(payload), len(payload))
        self._places.setdefault(piece.item_key, {}).setdefault(piece.sample, []).append(place)
        self._living[self._number] += 1
        if piece.reply is not None:
            del drafts[piece.sample]  # nothing more will come

    def close(self) -> None:
        """Close the segment, and remove it when nothing in it is needed."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if not self._living[self._number]:
                self._remove(self._number)

    def _append(self, frame: bytes) -> int:
        """Where the frame ends in the segment."""
        if self._file is None or self._file.size >= SEGMENT_BYTES:
            file = AppendFile(self._path(self._number + 1), must_be_new=True)
            self.close()
            self._file = file
            self._number += 1
        self._file.write(frame)
        return self._file.size

    def _load(self, number: int, done: Container[str]) -> None:
        with self._path(number).open("rb") as stream:
            for start, payload in _frames(stream):
                piece = msgspec.msgpack.decode(payload, type=Piece)
                if piece.item_key not in done:
                    places = self._places.setdefault(piece.item_key, {}).setdefault(piece.sample, [])
                    places.append(_Place(number, start, len(payload)))
                    self._living[number] += 1
        if not self._living[number]:
            self._remove(number)

    def _read(self, place: _Place) -> Piece | None:
        """Return the piece; None: its segment was taken away."""
        try:
            with self._path(place.segment).open("rb") as stream:
                stream.seek(place.start)
                return msgspec.msgpack.decode(stream.read(place.size), type=Piece)
        except FileNotFoundError:
            return None

    def _segments(self) -> list[int]:
        pattern = re.compile(re.escape(self._base.name) + r"\.(\d+)")
        return [int(match[1]) for path in self._base.parent.iterdir() if (match := pattern.fullmatch(path.name))]

    def _path(self, number: int) -> Path:
        return self._base.with_name(f"{self._base.name}.{number}")

    def _remove(self, number: int) -> None:
        self._living.pop(number, None)
        try:
            self._path(number).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s is not needed any more and cannot be removed: %s", self._path(number), error)


class Draft:
    """One response in the making, as far as it came. 12 bytes a token, because thousands wait for their group."""

    def __init__(self, journal: ResponseJournal, item_key: str, sample: bytes) -> None:
        self._journal = journal
        self.item_key, self.sample = item_key, sample
        self.prompt_ids = array("i")
        self.ids, self.logprobs = array("i"), array("d")
        self.version: str | None = None  # weights that generated the first token
        self.reply: EngineReply | None = None  # set when the response is finished
        self.body: bytes | None = None
        self._written = 0  # tokens in the journal
        self._written_at = time.monotonic()

    def take(self, piece: Piece) -> None:
        """Continue from a piece of the journal."""
        del self.ids[piece.start :], self.logprobs[piece.start :]
        if not self.ids:
            self.version = piece.version
        self.prompt_ids.frombytes(piece.prompt_ids)
        self.ids.frombytes(piece.ids)
        self.logprobs.frombytes(piece.logprobs)
        self.reply, self.body = piece.reply, piece.body
        self._written = len(self.ids)

    @property
    def index(self) -> int:
        """The number of responses to the same request that come before."""
        return int.from_bytes(self.sample[-PLACE_BYTES:], "big")

    def recall(self, prompt_ids: list[int], ids: list[int], logprobs: list[float], reply: EngineReply) -> None:
        """The response is known from elsewhere, and need not be journalled."""
        self.prompt_ids, self.ids, self.logprobs = array("i", prompt_ids), array("i", ids), array("d", logprobs)
        self.version, self.reply = reply.weight_version, reply

    def restart(self) -> None:
        """Forget the tokens so far: the response is generated again."""
        self.ids, self.logprobs, self._written = array("i"), array("d"), 0

    def grow(
        self, ids: list[int], logprobs: list[float], *, base: int, version: str | None, is_over: bool = False
    ) -> None:
        """The engine has generated `ids` [T] behind the first `base` tokens; journalled when enough is new.

        With `is_over`, `finish` follows. Until then nothing is written, as a response that continues behind its end
        token would be wrong.
        """
        if not self.ids:
            self.version = version
        known = len(self.ids) - base
        self.ids.extend(ids[known:])
        self.logprobs.extend(logprobs[known:])
        is_much = len(self.ids) - self._written >= PIECE_TOKENS or time.monotonic() - self._written_at >= PIECE_S
        if is_much and not is_over:
            self.save(version)

    def save(self, version: str | None) -> None:
        """Journal the tokens that are not yet."""
        if len(self.ids) > self._written:
            self._write(Piece(self.item_key, self.sample, version=version))

    def finish(self, reply: EngineReply, *, prompt_ids: list[int] | None = None, body: bytes | None = None) -> None:
        """The response is complete; what is not yet journalled is written with its facts."""
        self.reply, self.body = reply, body
        self.prompt_ids = array("i", prompt_ids or ())
        last = Piece(self.item_key, self.sample, version=reply.weight_version, reply=reply, body=body)
        last.prompt_ids = self.prompt_ids.tobytes()
        self._write(last)

    def _write(self, piece: Piece) -> None:
        piece.start = self._written
        piece.ids = self.ids[self._written :].tobytes()
        piece.logprobs = self.logprobs[self._written :].tobytes()
        self._journal.write(self, piece)
        self._written, self._written_at = len(self.ids), time.monotonic()


def _frames(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Start and payload of every whole frame up to the first that is torn."""
    at = 0
    while len(head := stream.read(_FRAME.size)) == _FRAME.size:
        size, checksum = _FRAME.unpack(head)
        payload = stream.read(size)
        if not payload or len(payload) < size or zlib.crc32(payload) != checksum:  # the CRC of nothing is 0
            return
        yield at + _FRAME.size, payload
        at += _FRAME.size + size


_GROUPS_KEPT = 64  # parsed, as the responses of a group are asked for one after the other
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "regex", "json_schema"),
)
_SAME_AS = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}


class EarlierResponse(NamedTuple):
    """One recorded response of one turn."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    reply: EngineReply


class EarlierRollouts:
    """The groups of a folder of rollout files, by item; lines are read when they are needed."""

    def __init__(self, folder: Path) -> None:
        """ConfigError when the folder holds no rollout files."""
        self._places: dict[str, tuple[Path, LedgerEntry]] = {}
        for index in sorted(folder.glob("*_rollouts_*.index")):
            files = RunFiles(folder, index.stem, env="", run="")
            shards = files.shards()
            for entry in read_entries(files):
                if entry.shard != REJECTED and entry.parts == 1:
                    self._places[entry.item_key] = (shards[entry.shard], entry)
        if not self._places:
            raise ConfigError(
                f"{folder} holds no rollouts of an earlier run; give the folder of its *_rollouts_*.jsonl"
            )
        self._record = lru_cache(_GROUPS_KEPT)(self._parse)

    def find(
        self, item_key: str, index: int, *, model: str, input_ids: list[int] | None, asked: Mapping[str, Json]
    ) -> EarlierResponse | None:
        """Response `index` of those rolled out for the item, if it has a score and answers just this request."""
        record = self._record(item_key)
        if record is None or not record.get("inference_logprobs"):
            return None
        unscored = {said["index"] for said in record.get("unscored") or ()}
        if index in unscored or (index := index - sum(place < index for place in unscored)) >= len(record["tokens"]):
            return None
        if (record.get("engine") or {}).get("model") != model or sampling_of(record["sampling"]) != sampling_of(asked):
            return None
        tokens, mask = record["tokens"][index], record["masks"][index]
        start = mask.count(IGNORE_INDEX)
        if tokens[:start] != input_ids or IGNORE_INDEX in mask[start:]:
            return None
        reasons, engine = record.get("finish_reasons"), record["engine"]
        reply = EngineReply(
            finish_reasons=[reasons[index] if reasons else "unknown"],
            prompt_tokens=start,
            completion_tokens=len(tokens) - start,
            model=model,
            base_url=engine.get("base_url"),
            weight_version=engine.get("weight_version_end"),
            sampling=record["sampling"],
        )
        return EarlierResponse(tokens[:start], tokens[start:], record["inference_logprobs"][index][start:], reply)

    def _parse(self, item_key: str) -> JsonObject | None:
        place = self._places.get(item_key)
        if place is None:
            return None
        try:
            return orjson.loads(read_line(*place))
        except (AtroposError, OSError, orjson.JSONDecodeError) as error:  # moved, compressed or damaged since
            logger.warning("not used again: the group of item %s in %s: %s", item_key, place[0], error)
            return None


def sampling_of(params: Mapping[str, object] | None) -> JsonObject:
    """Return the parameters that shape the distribution, by one name each.

    >>> sampling_of({"n": 4, "max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 3})
    {'max_tokens': 8, 'temperature': 1.0}
    """
    named = {_SAME_AS.get(name, name): value for name, value in (params or {}).items() if value is not None}
    return {name: named[name] for name in sorted(named) if name in _SAMPLING}
