"""The rollout files of one run: append-only JSON lines, one writer, never a torn or doubled line.

A group is done when its line is in the file: all lines of an item are handed to the operating system in one piece, and
what a full disk left half-written is cut off again. Groups that finish while others are being written wait for the next
piece, so that a fast engine costs few trips to the writing thread. Files are synced to disk in the background about
once a second. A finished file gets its HTML twin and, when asked for, a compressed copy in its place: the twin is
derived, and a shard is removed only after its copy is complete and synced.
"""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import orjson

from atroposlib.data.rollout_files import html_twin, zstd
from atroposlib.errors import DiskError
from atroposlib.json_lines import as_json, one_line, to_json
from atroposlib.lock_files import is_file_at, take_lock
from atroposlib.paths import remedy, unusable
from atroposlib.rollouts.failures import describe_error
from atroposlib.rollouts.ledger import REJECTED, Ledger, LedgerEntry, describe, read_ledger, read_line
from atroposlib.rollouts.locations import RunFiles
from atroposlib.system_limits import limit_reached
from atroposlib.type_definitions import Item, Json, JsonObject

logger = logging.getLogger(__name__)

DISK_FULL_DEADLINE_S = 600.0
DISK_FULL_RETRY_S = 2.0
LOST_ITS_END = "lost lines after the disk had taken them"


class FileGoneError(OSError):
    """A file that is open was removed or moved, or lost its end: what is written to it would not be found again."""


class AppendFile:
    """A file that only grows, by whole pieces, with one writer. `size` is what was written in whole pieces, in bytes.

    What a failed write left of a piece is cut off before the next. Whoever renames the file sets `path`.
    """

    def __init__(self, path: Path, *, must_be_new: bool = False) -> None:
        self.path = path
        new = os.O_EXCL if must_be_new else 0
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | new, 0o644)
        self.size = os.fstat(self.descriptor).st_size
        self._is_torn = False

    def write(self, data: bytes) -> None:
        """Append all of `data` or nothing of it.

        Raises:
            FileGoneError: the file is not at `path` any more, or shorter than it was; nothing was appended.
            OSError: nothing was appended, or what was cannot be cut off yet.
        """
        if not is_file_at(self.path, self.descriptor):
            raise FileGoneError(errno.ESTALE, f"{self.path.name} was removed or moved while it was written")
        if self.is_short:
            raise FileGoneError(errno.EIO, f"{self.path.name} {LOST_ITS_END}")
        self._cut()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]
        except OSError:
            self._is_torn = True
            with contextlib.suppress(OSError):  # a file server that is away refuses this, too
                self._cut()
            raise
        self.size += len(data)

    @property
    def is_short(self) -> bool:
        """Less is there than was written: a network disk that is full or became read-only drops what it had taken."""
        try:
            return self.path.stat().st_size < self.size
        except OSError:  # it is gone
            return False

    def close(self) -> None:
        """Close the file; that a network disk refuses what was written is logged."""
        _close(self.descriptor)

    def _cut(self) -> None:
        if self._is_torn:
            os.ftruncate(self.descriptor, self.size)
            self._is_torn = False


def sync_and_close(descriptors: Sequence[int]) -> None:
    """Bring everything to the disk itself; where that fails, everybody still reads what was written."""
    for descriptor in descriptors:
        _close(descriptor, os.fsync)


def _close(descriptor: int, *before: Callable[[int], None]) -> None:
    for step in (*before, os.close):
        try:
            step(descriptor)
        except OSError as error:  # a network disk that is full or became read-only says so only here
            logger.error("written, but maybe not on the disk itself: %s", error)


@dataclass(slots=True, eq=False)
class ItemLines:
    """The lines of one item and their index entries; the entries learn their places when they are written."""

    entries: Sequence[LedgerEntry]
    lines: Sequence[bytes]
    written: asyncio.Future[None]


class ShardWriter:
    """Appends to the last shard of a run, or to its one file, and to the index. Used by one thread at a time.

    The index may lag behind; its only gaps are damaged lines, so what it lacks is found at the end of the shards.
    """

    def __init__(self, files: RunFiles, ledger: Ledger, *, lines_per_shard: int) -> None:
        self._files = files
        self._per_shard = None if files.single else lines_per_shard
        self._number = ledger.last.shard if ledger.last else 1
        self._lines = ledger.groups_in_shard[self._number]
        existing = files.shards().get(self._number)
        is_packed = existing is not None and existing.suffix == ".zst"
        self._shard = None if is_packed else AppendFile(files.rollouts(self._number))
        self._index = AppendFile(files.sidecar("index"))
        self._index_owed = b""
        self.written: deque[ItemLines] = deque()  # for whoever counts them to take away
        self.is_dirty = False  # something was written since the last `duplicates`
        self.short: Path | None = None  # a file that lost its end
        self.on_shard_complete: Callable[[Path], object] = lambda path: None

    def write(self, waiting: deque[ItemLines]) -> None:
        """Write the first of `waiting` in one piece, and move them to `written`; OSError: none was written.

        More may be appended to `waiting` meanwhile.
        """
        shard = self._open_shard()
        items = self._that_fit(list(waiting))
        place = shard.size
        lines = [line for item in items for line in item.lines]
        shard.write(b"".join(lines))
        self.is_dirty = True
        entries = [entry for item in items for entry in item.entries]
        for entry, line in zip(entries, lines, strict=True):
            entry.shard, entry.start, entry.end = self._number, place, place + len(line)
            place = entry.end
        self._lines += len(entries)
        for _ in items:
            self.written.append(waiting.popleft())
        try:
            self.write_index(entries)
        except OSError:  # the lines themselves are safe, and without room the next ones will say so
            self._index_owed += _index_lines(entries)

    def write_index(self, entries: Sequence[LedgerEntry]) -> None:
        """Append entries, after those that are owed; OSError: none was written."""
        self._index.write(self._index_owed + _index_lines(entries))
        self._index_owed = b""

    def duplicates(self) -> list[int]:
        """Descriptors of the open files, for whoever syncs them; this object may close its own meanwhile."""
        self.is_dirty = False
        return [os.dup(file.descriptor) for file in self._files_open()]

    def close(self) -> None:
        sync_and_close([file.descriptor for file in self._files_open()])
        self.short = next((file.path for file in self._files_open() if file.is_short), self.short)

    def _files_open(self) -> list[AppendFile]:
        return [file for file in (self._shard, self._index) if file is not None]

    def _that_fit(self, waiting: Sequence[ItemLines]) -> list[ItemLines]:
        """The first of `waiting`, and what follows it into the open shard."""
        items: list[ItemLines] = []
        lines = self._lines
        for item in waiting:
            if items and self._per_shard is not None and lines >= self._per_shard:
                break
            items.append(item)
            lines += len(item.lines)
        return items

    def _open_shard(self) -> AppendFile:
        """The shard to write to: a new one when the last is full or compressed."""
        full = self._per_shard is not None and self._lines >= self._per_shard
        if self._shard is not None and not full:
            return self._shard
        if self._shard is not None:
            self.write_index([])  # whoever compresses it takes away what the index would be made of again
            sync_and_close([os.dup(self._index.descriptor), self._shard.descriptor])
            finished, self._shard = self._shard, None
            if finished.is_short:
                self.short = finished.path
                raise FileGoneError(errno.EIO, f"{finished.path.name} {LOST_ITS_END}")
            self.on_shard_complete(finished.path)
        self._shard = AppendFile(self._files.rollouts(self._number + 1))
        self._number += 1
        self._lines = 0
        return self._shard


def _index_lines(entries: Sequence[LedgerEntry]) -> bytes:
    return b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)


class RolloutFiles:
    """The only writer of one run's files, and its ledger.

    Not locked inside: `append` is called from one event loop, and one thread does all writing in order.
    """

    def __init__(self, files: RunFiles, *, groups_per_shard: int, accept_score: float, sends: bool) -> None:
        """Lock the run, read its ledger and repair its files. `sends`: acknowledgements of the API are kept.

        Raises:
            LaunchError: another process writes this run.
            PathError: nothing can be written there; DiskError: not now.
            DataError: a file of the run is damaged other than at its end.
        """
        self.files = files
        self._accept_score = accept_score
        try:
            files.folder.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(files.sidecar("lock"), otherwise="give this run another --env.run_name")
        except OSError as error:
            what = error.filename or files.folder
            raise unusable(f"{what} cannot be written", error, remedy(error)) from error
        for shard in files.shards().values():
            if shard.suffix == ".zst":  # complete: a kill came between the copy and the removal
                shard.with_suffix("").unlink(missing_ok=True)
        self.ledger: Ledger = read_ledger(files, accept_score=accept_score, keep_unacknowledged=sends)
        self.run_id = _run_id(self.ledger)
        self._shards = ShardWriter(files, self.ledger, lines_per_shard=groups_per_shard)
        self._acked = AppendFile(files.sidecar("acked")) if sends else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-files")
        self._waiting: deque[ItemLines] = deque()  # in the order in which they came
        self._writing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._listed: list[Path] = []
        self._list_at = 0.0
        self.on_wait: Callable[[str | None], None] = lambda waiting_for: None
        self.may_write: Callable[[str], bool] = lambda item_key: True  # asked by item key

    def on_shard_complete(self, tell: Callable[[Path], object]) -> None:
        """Call `tell`, in the writing thread, with every shard that is full."""
        self._shards.on_shard_complete = tell

    async def append(self, records: Sequence[Mapping[str, Json]]) -> Sequence[LedgerEntry]:
        """Write the records of one item; they are done when this returns, also when the caller is cancelled meanwhile.

        A full disk is waited for (`on_wait` is told), at most `DISK_FULL_DEADLINE_S`; nothing is written, and nothing
        returned, when the item is not ours any more then (`may_write`).

        Raises:
            OSError: the disk stayed full, or failed in another way; the file is gone, or as large as it may be.
        """
        entries = [describe(record, self._accept_score) for record in records]
        lines = [one_line(to_json(record)) + b"\n" for record in records]
        if self._is_closed:  # by a rollout that did not heed its cancellation
            raise OSError(errno.ESHUTDOWN, "the run has ended")
        item = ItemLines(entries, lines, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_waiting())
        await _uncancelled(item.written)
        return item.entries

    async def reject(self, item_key: str, tokens: int, backlog: Sequence[Item] = ()) -> None:
        """Remember that this item gave no usable group, so that a restart does not roll it out again."""
        entry = LedgerEntry(shard=REJECTED, item_key=item_key, completion_tokens=tokens, backlog=as_json(list(backlog)))
        self.ledger.add(entry, acknowledged=True)
        await self._patiently(lambda: self._shards.write_index([entry]))

    def acknowledge(self, group_ids: Sequence[str]) -> None:
        """Remember, soon, that the API has these groups: losing this only sends them once more."""
        for group_id in group_ids:
            self.ledger.unacknowledged.pop(group_id, None)
        if self._acked is not None:
            acked, text = self._acked, "".join(f"{group_id}\n" for group_id in group_ids).encode()
            self._thread.submit(acked.write, text)

    def read_group(self, entry: LedgerEntry) -> JsonObject:
        """One stored group, as it was written; DiskError: its file is gone."""
        plain = self.files.rollouts(entry.shard)
        path = next((each for each in (plain, _packed(plain)) if each.exists()), None)
        if path is None:
            raise DiskError(f"{plain} was removed or moved while the run used it; put it back")
        return orjson.loads(read_line(path, entry))

    async def listed(self) -> list[Path]:
        """Return the run's files as they were a moment ago: listing 100,000, after weeks, takes a second.

        It has at most a fiftieth of the time, and never the event loop's.
        """
        if (began := time.monotonic()) >= self._list_at:
            self._listed = list((await asyncio.to_thread(self.files.shards)).values())
            self._list_at = time.monotonic() + 50 * (time.monotonic() - began)
        return self._listed

    def missing(self) -> list[Path]:
        """Return the files that lines were written to and that are gone."""
        there = self.files.shards()
        return [self.files.rollouts(shard) for shard in sorted(self.ledger.groups_in_shard) if shard not in there]

    async def sync(self) -> None:
        """Bring what was written since the last call to the disk itself."""
        if self._shards.is_dirty:
            copies = await asyncio.get_running_loop().run_in_executor(self._thread, self._shards.duplicates)
            await asyncio.to_thread(sync_and_close, copies)

    def close(self) -> None:
        """Finish pending writes, sync, and let another process write this run.

        DiskError when a file lost its end; everything is closed then, too.
        """
        self._is_closed = True
        if self._writing is not None:
            self._writing.cancel()
        self._thread.shutdown(wait=True)
        self._settle()
        try:
            self._drop_what_is_not_ours()
            while self._waiting:
                self._shards.write(self._waiting)
        except OSError as error:
            logger.error("finished groups not written: folder=%s error=%s", self.files.folder, error)
        self._settle()
        for item in self._waiting:
            item.written.cancel()
        self._shards.close()
        if self._acked is not None:
            sync_and_close([self._acked.descriptor])
        if short := self._shards.short:
            with contextlib.suppress(OSError):
                self.files.sidecar("index").unlink()  # the next start reads what is there
        _close(self._lock)
        if short:
            raise DiskError(f"{short} {LOST_ITS_END}; give the same command again, which does their items again")

    async def _write_waiting(self) -> None:
        """Write what waits, and what comes to wait meanwhile, in as few pieces as possible."""
        while self._waiting:
            try:
                await self._patiently(lambda: self._shards.write(self._waiting), self._drop_what_is_not_ours)
            except Exception as error:
                self._settle()
                while self._waiting:
                    self._waiting.popleft().written.set_exception(error)
            else:
                self._settle()

    def _settle(self) -> None:
        """Count what the thread has written, and tell who waits for it."""
        while self._shards.written:
            item = self._shards.written.popleft()
            for entry in item.entries:
                self.ledger.add(entry, acknowledged=self._acked is None)
            self.ledger.finish(item.entries[0].item_key)
            item.written.set_result(None)

    def _drop_what_is_not_ours(self) -> None:
        """While we waited for space, another member of a shared run may have taken an item over."""
        self._settle()
        for item in list(self._waiting):
            if not self.may_write(item.entries[0].item_key):
                self._waiting.remove(item)
                item.entries = []
                item.written.set_result(None)

    async def _patiently(self, write: Callable[[], None], before_retry: Callable[[], None] = lambda: None) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + DISK_FULL_DEADLINE_S
        while True:
            try:
                await loop.run_in_executor(self._thread, write)
            except OSError as error:
                if isinstance(error, FileGoneError) or error.errno == errno.EFBIG or loop.time() > give_up:
                    raise
                self.on_wait(f"{self.files.folder} cannot be written: {limit_reached(error) or error.strerror}")
                await asyncio.sleep(DISK_FULL_RETRY_S)
                before_retry()
            else:
                self.on_wait(None)
                return


async def _uncancelled(done: asyncio.Future[None]) -> None:
    """Wait for `done` to its end also when cancelled meanwhile, then pass the cancellation on."""
    try:
        await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done])
        raise


def _run_id(ledger: Ledger) -> str:
    """Return the part of group ids that no other run has; kept in the lines already written."""
    if ledger.last and ledger.last.group_id.count("/") >= 2:
        return ledger.last.group_id.rsplit("/", 2)[0].rpartition("/")[2]
    return os.urandom(4).hex()


@dataclass(eq=False)
class Reports:
    """Makes the twins of one run."""

    write_html: Callable[[str, str], None]  # of (rollout file, page)
    compress: bool
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    def add(self, path: Path) -> None:
        """A shard is complete: report on it in the background."""
        task = asyncio.create_task(self._report(path, is_complete=True))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def finish(self, paths: Iterable[Path]) -> None:
        """Wait for reports in progress, then make those that are missing or of an earlier state of their rollouts."""
        await asyncio.gather(*self._running)
        for path in paths:
            twin = html_twin(path)
            if path.exists() and (not twin.exists() or twin.stat().st_mtime_ns != path.stat().st_mtime_ns):
                await self._report(path, is_complete=False)

    async def _report(self, path: Path, *, is_complete: bool) -> None:
        twin = html_twin(path)
        try:
            for stale in twin.parent.glob(f".{twin.name}.*"):
                stale.unlink()  # of a process that was stopped while it made the page
            modified = path.stat().st_mtime_ns
            await _in_thread(lambda: self.write_html(str(path), str(twin)))
            if twin.exists():
                os.utime(twin, ns=(modified, modified))  # which state it shows, also where the clock is set back
            if is_complete and self.compress:
                await _in_thread(lambda: compress(path))
        except Exception as error:
            logger.error("report not written: file=%s error=%s", path, describe_error(error))


async def _in_thread(call: Callable[[], object]) -> None:
    """As `asyncio.to_thread`, but a stopping process leaves the thread behind: a report may take minutes."""
    done: Future[BaseException | None] = Future()  # of what it raised: no future takes a StopIteration as its exception
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            call()
        except BaseException as error:
            done.set_result(error)
        else:
            done.set_result(None)

    threading.Thread(target=work, name="report", daemon=True).start()
    error = await asyncio.wrap_future(done)
    if isinstance(error, Exception):
        raise error
    if error is not None:  # `sys.exit` of an author's page would end the event loop
        raise RuntimeError(describe_error(error))


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}.zst")


def compress(path: Path) -> Path:
    """Replace `path` by `<path>.zst`; the new file's path. Interrupted at any point, one of the two is complete."""
    target = _packed(path)
    temporary = path.with_name(f".{path.name}.zst.new")
    with path.open("rb") as plain, temporary.open("wb") as packed:
        with zstd.ZstdFile(packed, "wb") as stream:
            shutil.copyfileobj(plain, stream, 1 << 20)
        packed.flush()
        os.fsync(packed.fileno())
    modified = path.stat().st_mtime_ns
    os.utime(temporary, ns=(modified, modified))
    os.replace(temporary, target)
    path.unlink()
    return target
