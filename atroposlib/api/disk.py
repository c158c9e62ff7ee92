"""The durable store: contents in segment files, an SQLite index beside them, one thread that writes both.

The segment files are the truth about groups (synced before the acknowledgement); the index is committed after that,
and groups it may have lost in a power cut are read back from the segments' tail.
"""

import asyncio
import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from atroposlib.api.compaction import worth_rewriting
from atroposlib.api.index import Index
from atroposlib.api.notes import Commit, DeliveryNotes, Note
from atroposlib.api.queue import Group
from atroposlib.api.records import Meta
from atroposlib.api.segments import SEGMENT_BYTES, SegmentFiles
from atroposlib.api.store import Change, NewGroup, Snapshot, StorageFull, over_limit, refuse_oversized
from atroposlib.api.writer import Writer
from atroposlib.errors import ConfigError, PathError
from atroposlib.lock_files import HeldError, hold
from atroposlib.paths import writable_dir

logger = logging.getLogger(__name__)

RESERVE_BYTES = 4 << 20
"""Kept free for the index, so that a full disk stops new groups but never the delivery of old ones."""

ROOM_BYTES = 1 << 20
"""A disk with less room than this is called full before a group meets its end."""

SLACK_BYTES = 2 * SEGMENT_BYTES
"""Consumed groups may hold so much of the disk before files are rewritten."""


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
        # consumed groups at the begin of the current file count against the limit too: they must not use it up
        segment_bytes = SEGMENT_BYTES if max_bytes is None else min(SEGMENT_BYTES, max_bytes // 8)
        self._segments = SegmentFiles(self.folder / "segments", segment_bytes)
        self._index = Index(self.folder / "index.sqlite")
        self._reserve = self.folder / "reserve"
        self._notes = DeliveryNotes(self.folder / "delivered")
        self._writer = Writer(self._add)
        self._unwritten: list[tuple[Change, int]] = []  # that the index could not take, and their `noted`; in order
        self._written = 0  # how many of the noted changes are in the index; of the numbers that notes have
        self._resets = 0  # that are not on disk yet

    # -- event loop ---------------------------------------------------------------------------------------------

    async def add(self, groups: Sequence[NewGroup]) -> list[Group]:
        refuse_oversized(groups, self._max_bytes)
        return await self._writer.add(groups)

    async def change(self, change: Change) -> None:
        noted = self._notes.last
        try:
            await self._writer.call(lambda: self._apply(change, noted))
        except StorageFull as error:
            if not change.noted:
                raise
            logger.warning("a delivery stays noted until the index can take it: %s", error)
        finally:
            self._notes.settle(self._written)

    def note_delivered(self, groups: Sequence[Group], step: int) -> Commit:
        return self._notes.prepare(Note(step, delivered=[group.number for group in groups]))

    def note_restored(self, groups: Sequence[Group], step: int) -> None:
        self._notes.prepare(Note(step, restored=self._located(groups)))()

    async def reset(self, run: bytes) -> None:
        noted = self._notes.last

        def forget() -> None:
            self._with_reserve(lambda: self._index.reset(run, noted))
            self._segments.drop_all()
            self._written += sum(change.noted for change, _ in self._unwritten)
            self._unwritten.clear()

        self._resets += 1
        try:
            await self._writer.call(forget)
        finally:
            self._resets -= 1

    async def read(self, groups: Sequence[Group]) -> list[bytes]:
        return await asyncio.to_thread(lambda: [self._segments.read(group) for group in groups])

    def release(self, groups: Sequence[Group]) -> None:
        def free() -> None:
            self._segments.free(groups)
            self._compact()

        self._writer.call_later(free)

    def knows_group_id(self, group_id: str) -> bool:
        return not self._resets and self._index.knows_group_id(group_id)

    def bytes_used(self) -> int:
        return self._segments.bytes_used()

    def why_full(self) -> str | None:
        if (reason := over_limit(self.bytes_used() + 1, self._max_bytes)) is not None:
            return reason
        missing_reserve = 0 if self._reserve.exists() else RESERVE_BYTES
        return None if self._segments.has_room(ROOM_BYTES, spare=missing_reserve) else _no_space(self.folder)

    def is_stuck(self) -> bool:
        return not self._writer.is_alive()

    async def close(self) -> None:
        await self._writer.close()
        self._segments.close()
        self._index.close()
        self._notes.close()
        os.close(self._lock)

    def _located(self, groups: Sequence[Group]) -> list[Group]:
        return [Group(g.number, g.env_id, g.sequences, self._segments.place_of(g)) for g in groups]

    # -- opening ------------------------------------------------------------------------------------------------

    def load(self) -> Snapshot:
        """Everything that waits; also adopts groups that the segments have and the index lost."""
        run = self._index.run()
        self._adopt_tail()
        self._apply_notes()
        groups: dict[int, tuple[Group, bool]] = {}
        missing = []
        for group, buffered in self._index.groups():
            if self._segments.keep(group.place):
                groups[group.number] = group, buffered
            else:
                missing.append(group)
        if missing:
            logger.error("%d stored groups are missing on disk and are dropped", len(missing))
            self._apply(Change(consumed=missing), self._notes.last)
        batches = []
        for batch, members in self._index.leases():
            batch.groups = [groups.pop(number)[0] for number in members if number in groups]
            batches.append(batch)
        last_segment, _, next_number = self._index.reach()
        self._segments.tidy(last_segment)
        return Snapshot(
            run=run,
            queued=[group for group, buffered in groups.values() if not buffered],
            buffered=[group for group, buffered in groups.values() if buffered],
            batches=batches,
            next_number=next_number,
            step=self._index.noted()[1],
        )

    def _apply_notes(self) -> None:
        """Do what was noted before the process died and not written any more."""
        notes = self._notes.read()
        self._with_reserve(lambda: self._index.repeat(notes))
        self._notes.clear()
        self._notes.last = self._written = max(0, self._index.noted()[0])

    def _adopt_tail(self) -> None:
        segment, end, next_number = self._index.reach()
        # lower numbers are in files that a compaction wrote: the index knows those groups, or that they are consumed
        adopted = [found for found in self._segments.scan(segment, end) if found[0].number >= next_number]
        if adopted:
            logger.warning("groups found that the index had not seen yet: %d", len(adopted))
            self._index.insert(adopted)

    # -- the writing thread -------------------------------------------------------------------------------------

    def _add(self, new: list[NewGroup]) -> list[Group]:
        used = sum(group.length for group in new) + self.bytes_used()
        if over_limit(used, self._max_bytes):
            used -= self._segments.drop_unneeded()
        if (reason := over_limit(used, self._max_bytes)) is not None:
            raise StorageFull(reason)
        self._hold_reserve()
        metas = [Meta(g.number, g.env_id, g.sequences, g.buffered, g.group_id) for g in new]
        places = self._segments.append(new, metas)
        try:
            self._index.insert(zip(metas, places, strict=True))
        except sqlite3.OperationalError as error:
            self._segments.undo(places)
            raise self._index_full(error) from error
        return [Group(g.number, g.env_id, g.sequences, place) for g, place in zip(new, places, strict=True)]

    def _apply(self, change: Change, noted: int) -> None:
        """Write a change, after those that there was no room for.

        Raises:
            StorageFull: no room for it now either; it is written before the next one.
        """
        self._unwritten.append((change, noted))
        while self._unwritten:
            change, noted = self._unwritten[0]
            found = replace(change, restored=self._located(change.restored))
            self._with_reserve(partial(self._index.write, found, noted))
            self._unwritten.pop(0)
            self._written += change.noted

    def _with_reserve(self, write: Callable[[], None]) -> None:
        """Write to the index; on a full disk with the help of the reserve, StorageFull when that is gone too."""
        try:
            write()
        except sqlite3.OperationalError as error:
            logger.warning("the index cannot grow (%s); using the reserve", error)
            self._reserve.unlink(missing_ok=True)
            try:
                write()
            except sqlite3.OperationalError as again:
                raise self._index_full(again) from again

    def _index_full(self, error: sqlite3.OperationalError) -> StorageFull:
        return StorageFull(f"the index in {self.folder} cannot grow ({error}); it goes on when it can")

    def _compact(self) -> None:
        """Rewrite files of which little is needed any more.

        Killed at any point of it: before the index is committed the new file is one that nobody needs, after it the
        old one is, and both go at the next start.
        """
        if self._unwritten:
            return  # the index still has groups that are gone
        for number in worth_rewriting(self._segments.usages(), self._slack):
            stored = list(self._index.groups(number))
            if len(stored) < self._segments.live(number):
                continue  # some are on their way to a trainer and may come back
            try:
                places = self._segments.rewrite(stored)
            except OSError as error:
                logger.warning("segment %d is not compacted: %s", number, error)
                continue
            groups = [group for group, _ in stored]
            self._index.move(groups, places)
            self._segments.moved(groups, places)
            logger.info("segment compacted: segment=%d groups=%d", number, len(groups))

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


def _lock_folder(folder: Path) -> int:
    """Hold the folder for this process; the lock goes with the process however it ends."""
    try:
        return hold(folder / "lock", mode=0o600)
    except HeldError as held:
        raise ConfigError(
            f"--state-dir {folder} is in use by the server with process id {held.pid}; stop it or choose another folder"
        ) from None
    except OSError as error:
        raise PathError(
            f"--state-dir {folder} cannot be locked: {error.strerror}; mount this disk with locks or choose another "
            "folder"
        ) from error
