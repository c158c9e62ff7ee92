"""Items of a shared run: each of its seats is filled by exactly one group, whichever member records it.

A run of N groups has seats 0 to N - 1. Seat s is filled by item s, or, when that fails for good, by s + N, s + 2N, ...
Members lease blocks of seats (`leases`). What a silent member left undone is taken over; a member with nothing left to
take ends when the holders of everything still undone have shown that they live.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Container, Iterable
from dataclasses import replace
from pathlib import Path

from atroposlib.rollouts.leases import PULSES_PER_TIMEOUT, Holder, Leases
from atroposlib.rollouts.ledger import recorded_items
from atroposlib.rollouts.locations import RunFiles
from atroposlib.rollouts.source import MAX_SET_ASIDE_IN_A_ROW
from atroposlib.type_definitions import Item

logger = logging.getLogger(__name__)

SETTLE_S = 2.0
"""Wait between taking a block over and reading what its former holder recorded: a line it had begun is then there."""


class SharedDraw:
    """Gives the items of the seats that this member leases."""

    def __init__(
        self,
        get_item: Callable[[int], Awaitable[Item | None]],
        leases: Leases,
        *,
        seats: int,
        seats_per_block: int,
        files: RunFiles,
        done: Container[str],
        skips: Callable[[Item], bool],
        on_end: Callable[[bool], None],
    ) -> None:
        """
        Args:
            done: keys of items that this member recorded or rejected.
            skips: items that must not be rolled out, as their task is set aside.
            on_end: told True when there is nothing left to draw, False when there is again.
        """
        self._get_item = get_item
        self._leases = leases
        self._seats = seats
        self._per_block = seats_per_block
        self._files = files
        self._done = done
        self._skips = skips
        self._on_end = on_end
        self._waiting: deque[int] = deque()  # indices to draw next
        self._held: dict[int, int] = {}  # block -> our term
        self._stored: set[str] = set()
        self._has_resumed = False
        self._look_again_at = 0.0
        self._others_have_the_rest = False

    def start(self) -> None:
        """Show the other members that this one lives."""
        self._leases.start()

    def close(self) -> None:
        """Leave what is not done to the others; call it when nothing more is written."""
        self._leases.close()

    async def __call__(self) -> tuple[str, Item] | None:
        skipped = 0
        while skipped < MAX_SET_ASIDE_IN_A_ROW:
            if not self._waiting and not await asyncio.to_thread(self._lease):
                self._on_end(self._others_have_the_rest and not self._waiting)  # a seat may have come back meanwhile
                return None
            index = self._waiting.popleft()
            if str(index) in self._done:
                self._waiting.appendleft(index + self._seats)
                continue
            try:
                item = await self._get_item(index)
                is_skipped = item is not None and self._skips(item)
            except BaseException:
                self._waiting.append(index + self._seats)  # its seat needs another one
                raise
            if item is None:
                logger.warning("no item for a seat: index=%d", index)
            elif is_skipped:
                self._waiting.append(index + self._seats)
                skipped += 1
            else:
                return str(index), item
        self._on_end(True)
        return None

    def may_store(self, key: str) -> bool:
        """Called right before a group is written: the seat must still be ours."""
        if not key.isdecimal():
            return True  # from a backlog, which has no seats
        block = self._block_of(int(key))
        if not self._leases.holds(block, self._held[block]):
            logger.warning("group dropped: another member took over its block: item=%s block=%d", key, block)
            return False
        self._stored.add(key)
        return True

    def settled(self, key: str) -> None:
        """Nothing more is done for an item; without a group its seat needs another one."""
        if key in self._stored:
            self._stored.discard(key)
        elif key.isdecimal() and self._leases.holds(block := self._block_of(int(key)), self._held[block]):
            self._waiting.append(int(key) + self._seats)
            self._on_end(False)

    def _lease(self) -> bool:
        """Put more seats in `_waiting`; False: there is nothing to take now."""
        if not self._has_resumed:
            self._has_resumed = True
            self._open(
                {block: h.term for block, h in self._leases.holders().items() if h.member == self._leases.member}
            )
            if self._waiting:
                return True
        block = self._leases.take_new()
        if block is not None:
            self._held[block] = 1
            self._waiting.extend(self._seats_of(block))
            return True
        if time.monotonic() < self._look_again_at:
            return False
        self._look_again_at = time.monotonic() + self._leases.timeout_s / PULSES_PER_TIMEOUT
        try:
            self._take_over()
        except FileNotFoundError as error:  # a living member compressed a shard while we read it
            logger.info("looking again soon: %s", error)
        return bool(self._waiting)

    def _take_over(self) -> None:
        """Take what silent members left undone; see whether every undone block is in living hands."""
        undone = self._undone()
        taken = {
            block: holder.term + 1
            for block, holder in undone.items()
            if self._leases.is_silent(holder.member) and self._leases.take(block, term=holder.term + 1)
        }
        if taken:
            logger.warning("taken over from silent members: blocks=%s", sorted(taken))
            time.sleep(SETTLE_S)
            self._open(taken)
        elif all(self._leases.is_alive(holder.member) for holder in undone.values()):
            logger.info("nothing left to take: blocks_of_others=%d", len(undone))
            self._others_have_the_rest = True

    def _open(self, blocks: dict[int, int]) -> None:
        """Draw the seats of blocks (to our term in them) that nobody has filled yet."""
        self._held.update(blocks)
        filled = self._filled() if blocks else set()
        self._waiting.extend(seat for block in sorted(blocks) for seat in self._seats_of(block) if seat not in filled)

    def _undone(self) -> dict[int, Holder]:
        """Blocks of others with seats that nobody has filled."""
        filled, holders = self._filled(), self._leases.holders()
        blocks = {self._block_of(seat) for seat in range(self._seats) if seat not in filled}
        return {block: holders[block] for block in sorted(blocks) if holders[block].member != self._leases.member}

    def _filled(self) -> set[int]:
        return filled_seats(self._leases.rollout_folders(), self._files, self._seats)

    def _block_of(self, index: int) -> int:
        return index % self._seats // self._per_block

    def _seats_of(self, block: int) -> range:
        return range(block * self._per_block, min(self._seats, (block + 1) * self._per_block))


def filled_seats(folders: Iterable[Path], files: RunFiles, seats: int) -> set[int]:
    """Seats with a group in one of the folders, whose files are named like `files`; nothing is changed there."""
    single = files.single and files.single.name
    theirs = [replace(files, folder=folder, single=folder / single if single else None) for folder in folders]
    keys = {key for each in theirs for key in recorded_items(each)}
    return {int(key) % seats for key in keys if key.isdecimal()}
