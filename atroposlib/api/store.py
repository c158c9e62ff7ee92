"""Where groups and the run are kept: one SQLite file, or memory. One thread does everything, in the order it was asked.

What is asked while a commit is being synced goes into the next one together; each answer comes after the synced commit.
`groups` says what waits and is all that a start reads; `contents` holds the binary groups, in pages of their own.
A delivered batch enters the `DeliveryLog` first, because that takes no more than a store to memory.
"""

import asyncio
import contextlib
import logging
import math
import queue
import shutil
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from atroposlib.api.queue import Batch, Group
from atroposlib.api.schemas import Refused
from atroposlib.api.state_folder import (
    CONSUMED,
    FILE,
    QUEUED,
    ROOM_BYTES,
    Change,
    Commit,
    LogEntry,
    NewGroup,
    StateFolder,
    StorageFull,
    Tables,
    Unreadable,
)
from atroposlib.errors import AtroposError

logger = logging.getLogger(__name__)
T = TypeVar("T")

SLACK_BYTES = 64 << 20
"""Free pages may hold so much of the disk, or as much as the groups, before they are given back."""

_VACUUM_PAGES = 32  # a full disk must have room for them in the WAL
_DELETED_AT_ONCE = 64


@dataclass
class Snapshot:
    """The content of a store when it was opened; numbers ascend."""

    run: bytes | None = None
    queued: list[Group] = field(default_factory=list)
    buffered: list[Group] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    next_number: int = 1


@dataclass(slots=True)
class _Job(Generic[T]):
    """Something to do for a request that waits; `is_read` needs no transaction."""

    work: Callable[[], T]
    done: asyncio.Future[T]  # of the request's event loop
    is_read: bool = False
    adds_bytes: int = 0
    change: tuple[Change, int] | None = None  # and the number of the last log entry that its `run` includes


class Store:
    """Keeps a run in a folder that only one server may use at a time, or in memory; raises as `StateFolder`."""

    def __init__(self, folder: Path | None, max_bytes: float = math.inf, *, accept_older: bool = False) -> None:
        self._folder = StateFolder(folder, accept_older=accept_older)
        self._db, self._log = self._folder.db, self._folder.log
        self._tables = Tables(self._db)
        self._max_bytes = max_bytes
        self._slack = min(SLACK_BYTES, max_bytes / 4)
        self._changes = self._tables.get("changes")
        self.used_bytes = 0  # bytes of groups that are still needed
        self._refused_bytes = 0  # of the groups that met StorageFull last
        self._refusal: str | None = None  # of the disk, when groups were to be written last; as a quota gives it
        self._dead: list[int] = []  # numbers of groups to delete
        self._unwritten: list[tuple[Change, int]] = []  # that there was no room for; in order
        self._written = 0  # how many logged changes are in the database; counts as the log's entries do
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="atropos-store", daemon=True)

    async def add(self, groups: Sequence[NewGroup]) -> list[bool]:
        """Store all or none, durably when this returns; False for each whose `group_id` was stored before.

        StorageFull when there is no room now, Refused when there can never be for this many bytes.
        """
        size = sum(new.group.size for new in groups)
        if size > self._max_bytes:
            raise Refused(
                413,
                f"this takes {size / 1e6:.1f} MB, but --max-queue-mb allows {self._max_bytes / 1e6:.1f} in all; send "
                "smaller or fewer groups at once, or raise --max-queue-mb",
            )
        return await self._ask(lambda: self._add(groups), adds_bytes=size)

    async def change(self, change: Change) -> None:
        """Apply a state change.

        StorageFull when there is no room for it now: it follows with the next one. Never for a logged change.
        """
        last = self._last_entry()
        try:
            await self._ask(lambda: self._tables.apply(change, last), change=(change, last))
        finally:
            if self._log is not None:
                self._log.clear_if_written(self._written)

    def log_delivered(self, groups: Sequence[Group], step: int) -> Commit:
        """Prepare it; once committed, no death delivers these groups again. The `change` that consumes them follows."""
        return self._prepare(LogEntry(step, delivered=[group.number for group in groups]))

    def log_restored(self, groups: Sequence[Group], step: int) -> None:
        """From now on no death loses these groups; the `change` that restores them follows."""
        self._prepare(LogEntry(step, restored=[group.number for group in groups]))()

    def _prepare(self, entry: LogEntry) -> Commit:
        return (lambda: None) if self._log is None else self._log.prepare(entry)

    def _last_entry(self) -> int:
        return 0 if self._log is None else self._log.last

    async def read(self, groups: Sequence[Group]) -> list[bytes]:
        """Return the stored contents. GroupLost when one is gone for good, Unreadable when reading fails now."""
        return await self._ask(lambda: [self._tables.content(group) for group in groups], is_read=True)

    def release(self, groups: Sequence[Group]) -> None:
        """Delete consumed groups, which will not be asked for again, when there is time."""

        def forget() -> None:
            self.used_bytes -= sum(group.size for group in groups)
            self._dead += [group.number for group in groups]

        if not self.is_stuck():  # else a start forgets them
            self._put(_Job(forget, asyncio.get_running_loop().create_future(), is_read=True))

    async def reset(self, run: bytes) -> None:
        """Forget everything and begin with `run`."""
        last = self._last_entry()

        def forget() -> list[int]:
            self.used_bytes = 0
            return self._tables.consume_all(run, last)

        forgotten = await self._ask(forget)
        await self._ask(lambda: self._dead.extend(forgotten), is_read=True)

    def why_full(self) -> str | None:
        """Say why a group that came now would meet StorageFull; None when there is room. Cheap."""
        used = self.used_bytes + max(1, self._refused_bytes)
        return _over_limit(used, self._max_bytes) or self._folder.no_room(ROOM_BYTES) or self._refusal

    def is_stuck(self) -> bool:
        """Return True when the thread has ended: nothing can be written any more until the process starts again."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def why_stuck(self) -> str | None:
        """Say why only a new start helps; None when it is not needed."""
        return "the writing thread has ended" if self.is_stuck() else self._folder.why_lost()

    async def close(self) -> None:
        """Return when all that was asked for is done and the files are closed; what is in memory stays usable."""
        if self._folder.path is None:
            await self._ask(lambda: None, is_read=True)
            return
        self._put(None)
        await asyncio.to_thread(self._thread.join)
        self._folder.close()

    async def _ask(
        self,
        work: Callable[[], T],
        *,
        is_read: bool = False,
        adds_bytes: int = 0,
        change: tuple[Change, int] | None = None,
    ) -> T:
        job = _Job(work, asyncio.get_running_loop().create_future(), is_read, adds_bytes, change)
        self._put(job)
        return await asyncio.shield(job.done)

    def _put(self, job: _Job | None) -> None:
        if self.is_stuck() and job is not None:
            raise Unreadable("the store's thread has ended; start the server again")
        if self._thread.ident is None:
            self._thread.start()
        self._jobs.put(job)

    def load(self) -> Snapshot:
        """Return everything that waits; called once, before anything else."""
        if self._log is not None:
            if entries := self._log.read():  # logged before the process died, and perhaps not written
                self._repeat(entries)
                self._log.clear()
            self._log.last = self._written = self._tables.get("logged")
        batches = self._tables.batches()
        leased = {number: batch for batch, members in batches for number in members}
        snapshot = Snapshot(run=self._tables.get("run"), batches=[batch for batch, _ in batches])
        for group, state in self._tables.groups():
            snapshot.next_number = group.number + 1
            if state == CONSUMED:
                self._dead.append(group.number)
                continue
            self.used_bytes += group.size
            if (batch := leased.get(group.number)) is not None:
                batch.groups.append(group)
            else:
                (snapshot.queued if state == QUEUED else snapshot.buffered).append(group)
        return snapshot

    def _repeat(self, entries: Sequence[LogEntry]) -> None:
        repeat = partial(self._tables.repeat, entries)
        try:
            self._transact([repeat])
        except sqlite3.OperationalError:
            self._folder.free_reserve()
            self._transact([repeat])

    def _work(self) -> None:
        while True:
            jobs = [self._jobs.get()]
            while not self._jobs.empty():
                jobs.append(self._jobs.get())
            asked = [job for job in jobs if job is not None]
            for job in asked:
                if job.is_read:
                    _read(job)
            if writes := [job for job in asked if not job.is_read]:
                self._write(writes)
            self._tidy()
            if len(asked) < len(jobs):
                self._close_tidily()
                return

    def _write(self, jobs: list[_Job]) -> None:
        """Write for several requests in one commit; when that fails, for each alone."""
        try:
            self._make_room(sum(job.adds_bytes for job in jobs))
            results = self._transact([job.work for job in jobs])
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._write([job])
            else:
                self._write_with_reserve(jobs[0], error)
            return
        self._written += sum(job.change[0].logged for job in jobs if job.change is not None)
        for job, result in zip(jobs, results, strict=True):
            failed = isinstance(result, AtroposError)
            if failed:
                _fail(job, result)
                continue
            if job.adds_bytes:
                self._refusal = None
            _finish(job, result)

    def _write_with_reserve(self, job: _Job, error: Exception) -> None:
        """Write a change on a full disk with the help of the reserve; keep it for the next one when that is gone
        too."""
        if isinstance(error, sqlite3.OperationalError) and job.change is not None and self._folder.free_reserve():
            logger.warning("%s cannot grow (%s); using the reserve", FILE, error)
            self._write([job])
            return
        if not isinstance(error, sqlite3.OperationalError):
            _fail(job, error)
            return
        what = "no space left in" if "full" in str(error) else f"{FILE} cannot be written in"
        full = StorageFull(f"{what} {self._folder.path} ({error}); this passes by itself when it can be")
        if job.change is None:
            self._refusal = str(full)
            _fail(job, full)
            return
        self._unwritten.append(job.change)
        if job.change[0].logged:
            logger.warning("a delivery stays in the log until the database can take it: %s", full)
            _finish(job, None)
        else:
            _fail(job, full)

    def _transact(self, works: Sequence[Callable[[], object]]) -> list[object]:
        """Do all in one commit; an AtroposError of one, raised before it wrote anything, is its result."""
        used = self.used_bytes
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for change, entry in self._unwritten:
                self._tables.apply(change, entry)
            results = []
            for work in works:
                try:
                    results.append(work())
                except AtroposError as error:
                    results.append(error)
            self._db.execute("UPDATE meta SET value = ? WHERE key = 'changes'", (self._changes + 1,))
            self._db.execute("COMMIT")
        except BaseException:
            self.used_bytes = used
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._changes += 1
        if self._log is not None:
            self._log.changes = self._changes
        self._written += sum(change.logged for change, _ in self._unwritten)
        self._unwritten.clear()
        return results

    def _add(self, groups: Sequence[NewGroup]) -> list[bool]:
        fresh, seen = [], set[str | None]()
        for group_id in (new.encoded.group_id for new in groups):
            fresh.append(group_id is None or not (group_id in seen or self._tables.knows(group_id)))
            seen.add(group_id)
        adding = [new for new, is_fresh in zip(groups, fresh, strict=True) if is_fresh]
        size = sum(new.group.size for new in adding)
        if (reason := _over_limit(self.used_bytes + size, self._max_bytes) or self._folder.no_room(size)) is not None:
            self._refused_bytes = size
            raise StorageFull(reason)
        self._refused_bytes = 0
        try:
            self._folder.hold_reserve()
        except StorageFull as error:
            self._refusal = str(error)
            raise
        self._tables.insert(adding)
        self.used_bytes += size
        return fresh

    def _make_room(self, size: int) -> None:
        """Empty the WAL before a commit that might not find room with it."""
        if size and self._folder.no_room(size, self._folder.wal_bytes()):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _tidy(self) -> None:
        """Delete what was consumed and give free pages back, a piece at a time, while nobody waits."""
        try:
            while self._dead and (len(self._dead) >= _DELETED_AT_ONCE or self._jobs.empty()):
                numbers = self._dead[:_DELETED_AT_ONCE]
                self._transact([partial(self._tables.delete, numbers)])
                del self._dead[: len(numbers)]
            while self._jobs.empty() and self._has_spare_pages():
                self._db.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # which shortens the file
        except (sqlite3.Error, OSError) as error:
            logger.warning("space is not given back now: %s", error)

    def _has_spare_pages(self) -> bool:
        """Return True while free pages take more than the slack, or than the groups, or than is free on the disk."""
        path = self._folder.path
        if path is None or self._folder.why_lost():
            return False
        return self._tables.free_bytes() > min(max(self._slack, self.used_bytes), shutil.disk_usage(path).free)

    def _close_tidily(self) -> None:
        """Give back free pages if that is quick, and end the log."""
        with contextlib.suppress(sqlite3.Error):
            if self._folder.path is not None and self._tables.free_bytes() <= SLACK_BYTES:
                self._db.executescript("PRAGMA incremental_vacuum")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _over_limit(used: int, most: float) -> str | None:
    """Say that groups would take more bytes than are allowed; None when they do not."""
    if used <= most:
        return None
    return (
        f"groups take {used / 1e6:.1f} of the {most / 1e6:.1f} MB of --max-queue-mb; "
        "they are taken again when the trainer has taken batches"
    )


def _read(job: _Job) -> None:
    try:
        _finish(job, job.work())
    except Exception as error:  # the waiting request gets it; the thread must live on
        _fail(job, error)


def _finish(job: _Job, result: object) -> None:
    _wake(job, job.done.set_result, result)


def _fail(job: _Job, error: Exception) -> None:
    _wake(job, job.done.set_exception, error)


def _wake(job: _Job, tell: Callable[[T], object], what: T) -> None:
    """Wake the request that waits. A future of `concurrent` would hold what was read until the next collection."""
    try:
        job.done.get_loop().call_soon_threadsafe(lambda: job.done.cancelled() or tell(what))
    except RuntimeError:
        logger.debug("the event loop ended before a job did")
