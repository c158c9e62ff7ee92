"""The rollout files of one run: append-only JSON lines, one writer, never a torn or doubled line.

A group is done when its line is in the file: all lines of an item are handed to the operating system in one piece, and
what a full disk left half-written is cut off again. Files are synced to disk in the background about once a second.
"""

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson

from atroposlib.errors import LaunchError
from atroposlib.rollouts.ledger import REJECTED, Entry, Ledger, describe, read_ledger, read_line
from atroposlib.rollouts.locations import RunFiles

T = TypeVar("T")

logger = logging.getLogger(__name__)

DISK_FULL_DEADLINE_S = 600.0
DISK_FULL_RETRY_S = 2.0

_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE


class RolloutFiles:
    """The only writer of one run's files, and its ledger.

    Not locked inside: `append` is called from one event loop, and one thread does all writing in order.
    """

    def __init__(self, files: RunFiles, *, groups_per_shard: int, accept_score: float, sends: bool) -> None:
        """Lock the run, read its ledger and repair its files.

        Args:
            groups_per_shard: lines per file, except where the user named one file.
            accept_score: a response is accepted when its score is above.
            sends: the groups also go to the trajectory API, so acknowledgements are kept.

        Raises:
            LaunchError: another process writes this run.
            DataError: a file of the run is damaged other than at its end.
        """
        self.files = files
        self._per_shard = None if files.single else groups_per_shard
        self._accept_score = accept_score
        files.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(files.beside("lock"))
        _remove_packed(files)
        self.ledger: Ledger = read_ledger(files, accept_score=accept_score, keep_unacknowledged=sends)
        self.run_id = _run_id(self.ledger)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollout-files")
        self._index = _open_append(files.beside("index"))
        self._acked = _open_append(files.beside("acked")) if sends else None
        self._shard = self.ledger.last.shard if self.ledger.last else 1
        self._lines_in_shard = self.ledger.groups_in_shard[self._shard]
        self._rollouts = _open_append(files.rollouts(self._shard)) if self._open_shard_is_plain() else None
        self._dirty = False
        self.on_shard_complete: Callable[[Path], None] = lambda path: None
        self.on_wait: Callable[[str | None], None] = lambda waiting_for: None

    async def append(self, records: Sequence[Mapping[str, Any]]) -> list[Entry]:
        """Write the records of one item; they are done when this returns, also when the caller is cancelled meanwhile.

        A full disk is waited for (`on_wait` is told), at most `DISK_FULL_DEADLINE_S`.

        Raises:
            OSError: the disk stayed full, or failed in another way.
        """
        return await _uncancelled(self._append(records))

    async def _append(self, records: Sequence[Mapping[str, Any]]) -> list[Entry]:
        entries = [describe(record, self._accept_score) for record in records]
        lines = [orjson.dumps(record, default=_jsonable, option=_JSON_OPTIONS) for record in records]
        await self._patiently(lambda: self._write(entries, lines))
        for entry in entries:
            self.ledger.add(entry, acknowledged=self._acked is None)
        self.ledger.finish(entries[0].item_key)
        return entries

    async def reject(self, item_key: str) -> None:
        """Remember that this item gave no usable group, so that a restart does not roll it out again."""
        entry = Entry(shard=REJECTED, item_key=item_key)
        self.ledger.add(entry, acknowledged=True)
        await self._patiently(lambda: _write_all(self._index, _line(entry)))

    def acknowledge(self, group_ids: Sequence[str]) -> None:
        """Remember, soon, that the API has these groups: losing this only sends them once more."""
        for group_id in group_ids:
            self.ledger.unacknowledged.pop(group_id, None)
        if self._acked is not None:
            acked, text = self._acked, "".join(f"{group_id}\n" for group_id in group_ids).encode()
            self._writer.submit(_write_all, acked, text)

    def read_group(self, entry: Entry) -> dict[str, Any]:
        """One stored group, as it was written."""
        return orjson.loads(read_line(self.files.shards()[entry.shard], entry))

    async def sync(self) -> None:
        """Bring what was written since the last call to the disk itself."""
        if self._dirty:
            self._dirty = False
            copies = await asyncio.get_running_loop().run_in_executor(self._writer, self._duplicates)
            await asyncio.to_thread(_sync_and_close, copies)

    def close(self) -> None:
        """Finish pending writes, sync, and let another process write this run."""
        self._writer.shutdown(wait=True)
        _sync_and_close([fd for fd in (self._rollouts, self._index, self._acked) if fd is not None])
        os.close(self._lock)

    def _duplicates(self) -> list[int]:
        return [os.dup(fd) for fd in (self._rollouts, self._index) if fd is not None]

    def _open_shard_is_plain(self) -> bool:
        existing = self.files.shards().get(self._shard)
        return existing is None or existing.suffix != ".zst"

    def _write(self, entries: Sequence[Entry], lines: Sequence[bytes]) -> None:
        """In the writer thread: one item's lines, then its index entries."""
        self._rotate_if_full()
        assert self._rollouts is not None
        place = os.fstat(self._rollouts).st_size
        _write_all(self._rollouts, b"".join(lines))
        for entry, line in zip(entries, lines, strict=True):
            entry.shard, entry.start, entry.end = self._shard, place, place + len(line)
            place = entry.end
        _write_all(self._index, b"".join(map(_line, entries)))
        self._lines_in_shard += len(lines)
        self._dirty = True

    def _rotate_if_full(self) -> None:
        full = self._per_shard is not None and self._lines_in_shard >= self._per_shard
        if self._rollouts is not None and not full:
            return
        if self._rollouts is not None:
            _sync_and_close([self._rollouts])
            finished = self.files.rollouts(self._shard)
            self._rollouts = None
            self.on_shard_complete(finished)
        self._shard += 1
        self._lines_in_shard = 0
        self._rollouts = _open_append(self.files.rollouts(self._shard))

    async def _patiently(self, write: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + DISK_FULL_DEADLINE_S
        while True:
            try:
                await loop.run_in_executor(self._writer, write)
            except OSError as error:
                if loop.time() > give_up:
                    raise
                self.on_wait(f"{self.files.folder} cannot be written ({error.strerror}); free some space")
                await asyncio.sleep(DISK_FULL_RETRY_S)
            else:
                self.on_wait(None)
                return


async def _uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Wait for `work` to its end also when cancelled meanwhile, then pass the cancellation on."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _open_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _write_all(descriptor: int, data: bytes) -> None:
    """Append all of `data` or nothing of it."""
    start = os.fstat(descriptor).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, start)
        raise


def _sync_and_close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise LaunchError(
            f"{path.with_suffix('')} is being written by process {pid}; wait for it, stop it, or give this run "
            "another --env.run_name"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _remove_packed(files: RunFiles) -> None:
    """Remove shards whose compressed copy is complete: a kill came between the copy and the removal."""
    for path in files.shards().values():
        if path.suffix == ".zst":
            path.with_suffix("").unlink(missing_ok=True)


def _run_id(ledger: Ledger) -> str:
    """What makes group ids of this run differ from those of every other; kept in the lines already written."""
    if ledger.last and ledger.last.group_id.count("/") >= 2:
        return ledger.last.group_id.rsplit("/", 2)[0].rpartition("/")[2]
    return os.urandom(4).hex()


def _line(entry: Entry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def _jsonable(value: object) -> object:
    """Tensors and other array-likes as lists, sets as lists, everything else as text."""
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        return to_list()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("latin-1")
    model_dump = getattr(value, "model_dump", None)
    return model_dump() if callable(model_dump) else str(value)
