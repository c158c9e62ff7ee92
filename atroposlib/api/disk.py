"""The durable store: contents in segment files, an SQLite index beside them, one thread that writes both.

Group commit: while one commit is being synced, the groups that arrive wait and go into the next one together. The
segment files are the truth about groups (synced before the acknowledgement); the index is committed after that
without a sync of its own, and what a power cut may take from it is read back from the segments' tail. Killing the
process loses nothing of either.
"""

import asyncio
import errno
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atroposlib.api.compaction import worth_rewriting
from atroposlib.api.notes import DeliveryNotes, Note
from atroposlib.api.queue import Batch, Group, Place
from atroposlib.api.segments import SEGMENT_BYTES, SegmentFiles
from atroposlib.api.store import Change, GroupLost, NewGroup, Snapshot, StorageFull, over_limit
from atroposlib.errors import ConfigError
from atroposlib.lock_files import HeldError, hold
from atroposlib.paths import writable_dir

logger = logging.getLogger(__name__)

RESERVE_BYTES = 4 << 20
"""Kept free for the index, so that a full disk stops new groups but never the delivery of old ones."""

ROOM_BYTES = 1 << 20
"""A disk with less room than this is called full before a group meets its end."""

SLACK_BYTES = 2 * SEGMENT_BYTES
"""Consumed groups may hold so much of the disk before files are rewritten."""

_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE groups (number INTEGER PRIMARY KEY, env_id INTEGER, sequences INTEGER, buffered INTEGER,
                     segment INTEGER, offset INTEGER, length INTEGER, digest BLOB);
CREATE TABLE group_ids (group_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE batches (number INTEGER PRIMARY KEY, batch_id TEXT, expires REAL, groups TEXT);
"""


@dataclass(slots=True)
class _Job:
    """Something for the writing thread: groups to add, or a function to call; `None` for both ends it."""

    groups: Sequence[NewGroup] = ()
    call: Callable[[], None] | None = None
    loop: asyncio.AbstractEventLoop | None = None
    done: asyncio.Future[Any] | None = None


class DiskStore:
    """Keeps a run in a folder that only one server may use at a time.

    Raises:
        PathError: the folder cannot be created or written.
        ConfigError: another server uses it, or it was written by another version.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        self.folder = writable_dir(folder, what="--state-dir")
        self._max_bytes = max_bytes
        self._slack = SLACK_BYTES if max_bytes is None else min(SLACK_BYTES, max_bytes // 4)
        self._lock = _lock_folder(self.folder)
        self._segments = SegmentFiles(self.folder / "segments")
        self._index = _open_index(self.folder / "index.sqlite")
        self._lookup = sqlite3.connect(self.folder / "index.sqlite", check_same_thread=False)
        self._reserve = self.folder / "reserve"
        self._notes = DeliveryNotes(self.folder / "delivered")
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="atropos-store", daemon=True)
        self._thread.start()

    # -- event loop ---------------------------------------------------------------------------------------------

    async def add(self, groups: Sequence[NewGroup]) -> list[Group]:
        size = sum(group.length for group in groups)
        if (reason := over_limit(self.bytes_used() + size, self._max_bytes)) is not None:
            raise StorageFull(reason)
        return await self._submit(_Job(groups=groups))

    async def change(self, change: Change) -> None:
        await self._submit(_Job(call=lambda: self._apply(change)))
        if change.noted:
            self._notes.settle()

    def note_delivered(self, groups: Sequence[Group], step: int) -> None:
        self._notes.add(Note(step, delivered=[group.number for group in groups]))

    def note_restored(self, groups: Sequence[Group], step: int) -> None:
        moved = [Group(g.number, g.env_id, g.sequences, self._segments.place_of(g)) for g in groups]
        self._notes.add(Note(step, restored=moved))

    async def reset(self, run: bytes) -> None:
        await self._submit(_Job(call=lambda: self._reset(run)))

    async def read(self, groups: Sequence[Group]) -> list[bytes]:
        return await asyncio.to_thread(lambda: [self._segments.read(group) for group in groups])

    def release(self, groups: Sequence[Group]) -> None:
        def free() -> None:
            self._segments.free(groups)
            self._compact()

        self._jobs.put(_Job(call=free))

    def knows_group_id(self, group_id: str) -> bool:
        return bool(self._lookup.execute("SELECT 1 FROM group_ids WHERE group_id = ?", (group_id,)).fetchall())

    def bytes_used(self) -> int:
        return self._segments.bytes_used()

    def why_full(self) -> str | None:
        if (reason := over_limit(self.bytes_used() + 1, self._max_bytes)) is not None:
            return reason
        missing_reserve = 0 if self._reserve.exists() else RESERVE_BYTES
        return None if self._segments.has_room(ROOM_BYTES, spare=missing_reserve) else _no_space(self.folder)

    def is_stuck(self) -> bool:
        return not self._thread.is_alive()

    async def close(self) -> None:
        self._jobs.put(_Job())
        await asyncio.to_thread(self._thread.join)
        self._segments.close()
        self._lookup.close()
        self._index.close()
        self._notes.close()
        os.close(self._lock)

    async def _submit(self, job: _Job) -> Any:
        job.loop = asyncio.get_running_loop()
        job.done = job.loop.create_future()
        self._jobs.put(job)
        return await asyncio.shield(job.done)

    # -- opening ------------------------------------------------------------------------------------------------

    def load(self) -> Snapshot:
        """Everything that waits; also adopts groups that the segments have and the index lost."""
        run = self._get_meta("run")
        self._adopt_tail()
        step = self._apply_notes()
        groups: dict[int, tuple[Group, bool]] = {}
        missing = []
        for number, env_id, sequences, buffered, *place in self._index.execute("SELECT * FROM groups ORDER BY number"):
            group = Group(number, env_id, sequences, Place(*place))
            if self._segments.keep(group.place):
                groups[number] = group, bool(buffered)
            else:
                missing.append(group)
        if missing:
            logger.error("%d stored groups are missing on disk and are dropped", len(missing))
            self._apply(Change(consumed=missing))
        batches = []
        for number, batch_id, expires, members in self._index.execute("SELECT * FROM batches ORDER BY number"):
            found = [groups.pop(member)[0] for member in msgspec.json.decode(members) if member in groups]
            batches.append(Batch(number, found, counted=True, batch_id=batch_id, expires=expires))
        last_segment, _, next_number = self._indexed()
        self._segments.tidy(last_segment)
        return Snapshot(
            run=run,
            queued=[group for group, buffered in groups.values() if not buffered],
            buffered=[group for group, buffered in groups.values() if buffered],
            batches=batches,
            next_number=next_number,
            step=step,
        )

    def _apply_notes(self) -> int | None:
        """Do what was noted just before the process died and not written any more; the step after the last of it."""
        step = None
        for note in self._notes.read():
            with self._index:
                gone = self._index.executemany("DELETE FROM groups WHERE number = ?", [(n,) for n in note.delivered])
                self._restore(note.restored)
            step = note.step if gone.rowcount > 0 or note.restored else step
        self._notes.clear()
        return step

    def _adopt_tail(self) -> None:
        segment, end, next_number = self._indexed()
        # lower numbers are in files that a compaction wrote: the index knows those groups, or that they are consumed
        adopted = [found for found in self._segments.scan(segment, end) if found[0].number >= next_number]
        if adopted:
            logger.warning("groups found that the index had not seen yet: %d", len(adopted))
            self._insert(
                ((meta.number, meta.env_id, meta.sequences, meta.buffered), meta.group_id, place)
                for meta, place in adopted
            )

    def _indexed(self) -> tuple[int, int, int]:
        """How far the index goes: segment, byte, next group number."""
        text = self._get_meta("indexed")
        return (0, 0, 1) if text is None else tuple(msgspec.json.decode(text))

    def _get_meta(self, key: str) -> bytes | None:
        row = self._index.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    # -- the writing thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        jobs: list[_Job] = []
        while True:
            jobs.append(self._jobs.get())
            while not self._jobs.empty():
                jobs.append(self._jobs.get())
            while jobs:
                adding = next((i for i, job in enumerate(jobs) if not job.groups), len(jobs))
                if adding:
                    self._add_together(jobs[:adding])
                    del jobs[:adding]
                    continue
                job = jobs.pop(0)
                if job.call is None:
                    return
                self._run(job, job.call)

    def _run(self, job: _Job, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the waiting request gets it; this thread must live on
            _finish(job, error=error)
        else:
            _finish(job)

    def _add_together(self, jobs: list[_Job]) -> None:
        """One commit for several requests. When together they do not fit, each is tried alone."""
        try:
            groups = self._add([group for job in jobs for group in job.groups])
        except StorageFull as error:
            if len(jobs) == 1:
                _finish(jobs[0], error=error)
                return
            for job in jobs:
                self._add_together([job])
        except Exception as error:
            for job in jobs:
                _finish(job, error=error)
        else:
            for job in jobs:
                _finish(job, result=groups[: len(job.groups)])
                del groups[: len(job.groups)]

    def _add(self, new: list[NewGroup]) -> list[Group]:
        self._hold_reserve()
        places = self._segments.append(new)
        try:
            self._insert(
                ((g.number, g.env_id, g.sequences, g.buffered), g.group_id, place)
                for g, place in zip(new, places, strict=True)
            )
        except sqlite3.OperationalError as error:
            self._segments.undo(places)
            raise StorageFull(
                f"the index in {self.folder} cannot grow ({error}); groups are taken again when it can"
            ) from error
        return [Group(g.number, g.env_id, g.sequences, place) for g, place in zip(new, places, strict=True)]

    def _insert(self, rows: Iterable[tuple[tuple[Any, ...], str | None, Place]]) -> None:
        groups, ids, last, number = [], [], None, 0
        for values, group_id, place in rows:
            groups.append((*values, place.segment, place.offset, place.length, place.digest))
            last, number = place, max(number, values[0])
            if group_id is not None:
                ids.append((group_id,))
        assert last is not None
        with self._index:
            self._index.executemany("INSERT OR REPLACE INTO groups VALUES (?,?,?,?,?,?,?,?)", groups)
            if ids:
                self._index.executemany("INSERT OR IGNORE INTO group_ids VALUES (?)", ids)
            self._set_meta("indexed", msgspec.json.encode((last.segment, last.offset + last.length, number + 1)))

    def _apply(self, change: Change) -> None:
        """Write a change; on a full disk, with the help of the reserve."""
        try:
            self._write_change(change)
        except sqlite3.OperationalError as error:
            logger.warning("the index cannot grow (%s); using the reserve", error)
            self._reserve.unlink(missing_ok=True)
            self._write_change(change)

    def _write_change(self, change: Change) -> None:
        with self._index:
            if change.run is not None:
                self._set_meta("run", change.run)
            if change.consumed:
                self._index.executemany(
                    "DELETE FROM groups WHERE number = ?", [(group.number,) for group in change.consumed]
                )
            if change.restored:
                self._restore(change.restored)
            if change.completed:
                self._index.executemany(
                    "UPDATE groups SET buffered = 0 WHERE number = ?", [(n,) for n in change.completed]
                )
            for batch in change.leased:
                members = msgspec.json.encode([group.number for group in batch.groups]).decode()
                row = (batch.number, batch.batch_id, batch.expires, members)
                self._index.execute("INSERT OR REPLACE INTO batches VALUES (?,?,?,?)", row)
            if change.settled:
                self._index.executemany(
                    "DELETE FROM batches WHERE number = ?", [(number,) for number in change.settled]
                )

    def _restore(self, groups: Sequence[Group]) -> None:
        places = [_columns(self._segments.place_of(group)) for group in groups]
        rows = [(g.number, g.env_id, g.sequences, False, *place) for g, place in zip(groups, places, strict=True)]
        self._index.executemany("INSERT OR REPLACE INTO groups VALUES (?,?,?,?,?,?,?,?)", rows)

    def _compact(self) -> None:
        """Rewrite files of which little is needed any more.

        Killed at any point of it: before the index is committed the new file is one that nobody needs, after it the
        old one is, and both go at the next start. The index is synced before the old file goes, for power cuts.
        """
        for number in worth_rewriting(self._segments.usages(), self._slack):
            rows = self._index.execute("SELECT * FROM groups WHERE segment = ? ORDER BY number", (number,)).fetchall()
            groups = [(Group(n, env_id, size, Place(*place)), bool(held)) for n, env_id, size, held, *place in rows]
            if len(groups) < self._segments.live(number):
                continue  # some are on their way to a trainer and may come back
            try:
                places = self._segments.rewrite(groups)
            except (StorageFull, GroupLost) as error:
                logger.warning("segment %d is not compacted: %s", number, error)
                continue
            self._index.execute("PRAGMA synchronous = FULL")
            with self._index:
                self._index.executemany(
                    "UPDATE groups SET segment = ?, offset = ? WHERE number = ?",
                    [(p.segment, p.offset, group.number) for (group, _), p in zip(groups, places, strict=True)],
                )
            self._index.execute("PRAGMA synchronous = NORMAL")
            self._segments.moved([group for group, _ in groups], places)
            logger.info("segment compacted: segment=%d groups=%d", number, len(groups))

    def _reset(self, run: bytes) -> None:
        with self._index:
            for table in ("groups", "group_ids", "batches"):
                self._index.execute(f"DELETE FROM {table}")
            self._set_meta("run", run)
        self._segments.drop_all()

    def _set_meta(self, key: str, value: bytes) -> None:
        self._index.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def _hold_reserve(self) -> None:
        """Make sure that the reserve exists; StorageFull when there is no room for it."""
        if self._reserve.exists():
            return
        fd = os.open(self._reserve, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        except OSError as error:
            self._reserve.unlink()
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(_no_space(self.folder)) from error
            raise
        finally:
            os.close(fd)


def _no_space(folder: Path) -> str:
    return f"no space left in {folder}; groups are taken again when there is"


def _finish(job: _Job, *, result: Any = None, error: Exception | None = None) -> None:
    """Wake the request that waits for a job."""
    if job.loop is None or job.done is None:
        if error is not None:
            logger.error("a background change failed", exc_info=error)
        return

    def wake(done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    try:
        job.loop.call_soon_threadsafe(wake, job.done)
    except RuntimeError:
        logger.debug("the event loop ended before a job did")


def _columns(place: Place) -> tuple[int, int, int, bytes]:
    return place.segment, place.offset, place.length, place.digest


def _open_index(path: Path) -> sqlite3.Connection:
    index = sqlite3.connect(path, check_same_thread=False, isolation_level="IMMEDIATE")
    index.execute("PRAGMA journal_mode = WAL")
    index.execute("PRAGMA synchronous = NORMAL")
    (version,) = index.execute("PRAGMA user_version").fetchone()
    if version == 0:
        index.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;")
    elif version != _SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has format {version}, this version reads {_SCHEMA_VERSION}; choose another --state-dir"
        )
    return index


def _lock_folder(folder: Path) -> int:
    """Hold the folder for this process; the lock goes with the process however it ends."""
    try:
        return hold(folder / "lock", mode=0o600)
    except HeldError as held:
        raise ConfigError(
            f"--state-dir {folder} is in use by the server with process id {held.pid}; stop it or choose another folder"
        ) from None
