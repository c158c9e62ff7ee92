"""A run that several members share: each of its seats is filled by exactly one group, whichever member records it.

A run of N groups has seats 0 to N - 1. Seat s is filled by item s, or, when that fails for good, by s + N, s + 2N, ...
Members lease blocks of seats. What a silent member left undone is taken over; a member with nothing left to take ends
when the holders of everything still undone have shown that they live.

Who leases which block is decided by files in a folder that all can see:

    b000012.1        made by the member that took block 12 first; making it fails for everybody else
    b000012.2        made by the one that took the block over; the highest number holds it
    pulse.<member>   rewritten by a living member; says where its rollouts are
    member.<member>  made by the first that uses this name; says where its rollouts are, seen from here

Block files are only ever added, so no reader sees a change half done. A member is silent when its pulse has not
changed for `timeout_s` of the watcher's own clock; the clocks of the nodes need not agree.
"""

import asyncio
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Container
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from atroposlib.errors import LaunchError
from atroposlib.paths import write_text_atomic
from atroposlib.rollouts.ledger import read_recorded
from atroposlib.rollouts.locations import RunFiles
from atroposlib.rollouts.source import MAX_SET_ASIDE_IN_A_ROW
from atroposlib.type_definitions import Item

logger = logging.getLogger(__name__)

PULSES_PER_TIMEOUT = 6
_BLOCK = re.compile(r"b(\d{6,})\.(\d+)")


class Holder(NamedTuple):
    """Who has a block, and its number among the holders (from 1)."""

    member: str
    term: int


class _Watched(NamedTuple):
    """A pulse as this process has seen it."""

    text: str | None
    since: float  # monotonic seconds
    has_changed: bool = False


class Leases:
    """The blocks 0 to `blocks` - 1, as one member sees them. Methods block on the disk; any one thread may call."""

    def __init__(self, folder: Path, member: str, *, blocks: int, timeout_s: float, rollouts: Path) -> None:
        """LaunchError when the name belongs to a member whose `rollouts` (folder of files) are elsewhere."""
        self.member = member
        self.timeout_s = timeout_s
        self._folder = folder
        self._new_blocks = iter(range(blocks))  # that may be free
        self._rollouts = rollouts
        self._members: dict[str, str] = {}  # block file -> its content, which never changes
        self._watched: dict[str, _Watched] = {}
        self._stop = threading.Event()
        self._pulse = threading.Thread(target=self._keep_beating, name="lease pulse", daemon=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._claim_name()

    def start(self) -> None:
        """Show the others that this member lives, from now until `close`."""
        self._beat("running")
        self._pulse.start()

    def close(self) -> None:
        """Let the others take over at once what is not done."""
        if not self._stop.is_set():
            self._stop.set()
            self._pulse.join()
            try:
                self._beat("stopped")
            except OSError as error:
                logger.warning("end not announced, others wait for the timeout: %s", error)

    def holders(self) -> dict[int, Holder]:
        """Every block that somebody has taken."""
        terms: dict[int, int] = {}
        for name in os.listdir(self._folder):
            if match := _BLOCK.fullmatch(name):
                block, term = map(int, match.groups())
                terms[block] = max(terms.get(block, 0), term)
        return {block: Holder(self._member_of(block, term), term) for block, term in terms.items()}

    def take_new(self) -> int | None:
        """A block that nobody has taken yet, now ours; None: all are taken."""
        return next((block for block in self._new_blocks if self.take(block, term=1)), None)

    def take(self, block: int, *, term: int) -> bool:
        """Become holder number `term` of a block; False: another was first."""
        try:
            descriptor = os.open(self._path(block, term), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as stream:
            stream.write(self.member)
        return True

    def holds(self, block: int, term: int) -> bool:
        """Nobody has taken the block over since this member became its holder number `term`."""
        return not self._path(block, term + 1).exists()

    def is_silent(self, member: str) -> bool:
        """Stopped, or without a sign of life for the timeout while we watched."""
        watched = self._look_at(member)
        if watched.text is not None and json.loads(watched.text)["state"] == "stopped":
            return True
        return time.monotonic() - watched.since > self.timeout_s

    def is_alive(self, member: str) -> bool:
        """It gave a sign of life while we watched."""
        return self._look_at(member).has_changed and not self.is_silent(member)

    def rollout_folders(self) -> list[Path]:
        """Where the members of the run, this one included, have their rollout files."""
        pulses = sorted(self._folder.glob("pulse.*"))
        return [Path(json.loads(path.read_text("utf-8"))["rollouts"]) for path in pulses]

    def _claim_name(self) -> None:
        """Two members of one name would take each other's blocks for their own."""
        path, ours = self._folder / f"member.{self.member}", os.path.relpath(self._rollouts, self._folder)
        try:
            with path.open("x", encoding="utf-8") as claim:
                claim.write(ours)
        except FileExistsError:
            theirs = path.read_text("utf-8")
            if theirs not in ("", ours):  # empty: a kill came between the two steps
                raise LaunchError(
                    f"{path} says that the rollouts of member {self.member!r} are in {theirs}, not in {ours}; give "
                    "every member of a shared run another env.lease_owner, or remove that file if they were moved"
                ) from None

    def _look_at(self, member: str) -> _Watched:
        path = self._folder / f"pulse.{member}"
        text = path.read_text("utf-8") if path.exists() else None
        watched = self._watched.get(member)
        if watched is None or text != watched.text:
            self._watched[member] = _Watched(text, time.monotonic(), has_changed=watched is not None)
        return self._watched[member]

    def _member_of(self, block: int, term: int) -> str:
        path = self._path(block, term)
        known = self._members.get(path.name) or path.read_text("utf-8")
        if known:  # empty for a moment while it is being made, or for ever when that was interrupted
            self._members[path.name] = known
        return known

    def _path(self, block: int, term: int) -> Path:
        return self._folder / f"b{block:06d}.{term}"

    def _keep_beating(self) -> None:
        while not self._stop.wait(self.timeout_s / PULSES_PER_TIMEOUT):
            try:
                self._beat("running")
            except OSError as error:
                logger.warning("sign of life not written: folder=%s error=%s", self._folder, error)

    def _beat(self, state: str) -> None:
        pulse = {"state": state, "at": time.time(), "pid": os.getpid(), "rollouts": str(self._rollouts)}
        write_text_atomic(self._folder / f"pulse.{self.member}", json.dumps(pulse))


SETTLE_S = 2.0
"""Wait between taking a block over and reading what its former holder recorded: a line it had begun is then there."""


@dataclass(eq=False)
class SharedDraw:
    """Gives the items of the seats that this member leases."""

    get_item: Callable[[int], Awaitable[Item | None]]
    leases: Leases
    _: KW_ONLY
    seats: int
    seats_per_block: int
    files: RunFiles
    done: Container[str]  # keys of items that this member recorded or rejected
    skips: Callable[[Item], bool]  # items that must not be rolled out, as their task is set aside
    on_end: Callable[[bool], None] = lambda is_over: None  # told when nothing is left to draw, or is again
    _waiting: deque[int] = field(default_factory=deque)  # indices to draw next
    _held: dict[int, int] = field(default_factory=dict)  # block -> our term
    _unopened: dict[int, int] | None = None  # those of them whose seats are not in `_waiting` yet; None: not looked for
    _stored: set[str] = field(default_factory=set)
    _look_again_at: float = 0.0
    _others_have_the_rest: bool = False

    async def __call__(self) -> tuple[str, Item] | None:
        skipped = 0
        while skipped < MAX_SET_ASIDE_IN_A_ROW:
            if not self._waiting and not await asyncio.to_thread(self._lease):
                self.on_end(self._others_have_the_rest and not self._waiting)  # a seat may have come back meanwhile
                return None
            index = self._waiting.popleft()
            if str(index) in self.done:
                self._waiting.appendleft(index + self.seats)
                continue
            try:
                item = await self.get_item(index)
                is_skipped = item is not None and self.skips(item)
            except BaseException:
                self._waiting.append(index + self.seats)  # its seat needs another one
                raise
            if item is None:
                logger.warning("no item for a seat: index=%d", index)
            elif is_skipped:
                self._waiting.append(index + self.seats)
                skipped += 1
            else:
                return str(index), item
        self.on_end(True)
        return None

    def may_store(self, key: str) -> bool:
        """Called right before a group is written: the seat must still be ours."""
        if not key.isdecimal():
            return True  # from a backlog, which has no seats
        block = self._block_of(int(key))
        if not self.leases.holds(block, self._held[block]):
            logger.warning("group dropped: another member took over its block: item=%s block=%d", key, block)
            return False
        self._stored.add(key)
        return True

    def settled(self, key: str) -> None:
        """Nothing more is done for an item; without a group its seat needs another one."""
        if key in self._stored:
            self._stored.discard(key)
        elif key.isdecimal() and self.leases.holds(block := self._block_of(int(key)), self._held[block]):
            self._waiting.append(int(key) + self.seats)
            self.on_end(False)

    def _lease(self) -> bool:
        """Put more seats in `_waiting`; False: there is nothing to take now."""
        try:
            if self._unopened is None:
                holders = self.leases.holders()
                self._unopened = {block: h.term for block, h in holders.items() if h.member == self.leases.member}
            self._open(self._unopened)
            if not self._waiting and (block := self.leases.take_new()) is not None:
                self._held[block] = 1
                self._waiting.extend(self._seats_of(block))
            if not self._waiting and time.monotonic() >= self._look_again_at:
                self._look_again_at = time.monotonic() + self.leases.timeout_s / PULSES_PER_TIMEOUT
                self._take_over(self._unopened)
                self._open(self._unopened)
        except FileNotFoundError as error:  # a living member compressed a shard while we read it
            logger.info("looking again soon: %s", error)
        return bool(self._waiting)

    def _take_over(self, taken: dict[int, int]) -> None:
        """Add to `taken` what silent members left undone; see whether every undone block is in living hands."""
        filled, holders = self._filled(), self.leases.holders()
        blocks = {self._block_of(seat) for seat in range(self.seats) if seat not in filled}
        undone = {block: holders[block] for block in sorted(blocks) if holders[block].member != self.leases.member}
        try:
            for block, (member, term) in undone.items():
                if self.leases.is_silent(member) and self.leases.take(block, term=term + 1):
                    taken[block] = term + 1
        finally:  # also when the disk is full after some
            if taken:
                logger.warning("taken over from silent members: blocks=%s", sorted(taken))
                time.sleep(SETTLE_S)
        if not taken and all(self.leases.is_alive(holder.member) for holder in undone.values()):
            logger.info("nothing left to take: blocks_of_others=%d", len(undone))
            self._others_have_the_rest = True

    def _open(self, blocks: dict[int, int]) -> None:
        """Draw the seats of blocks (to our term in them) that nobody has filled yet; empties `blocks`."""
        self._held.update(blocks)
        filled = self._filled() if blocks else set()
        self._waiting.extend(seat for block in sorted(blocks) for seat in self._seats_of(block) if seat not in filled)
        blocks.clear()

    def _filled(self) -> set[int]:
        """Seats with a group in the files of any member; nothing is changed there."""
        single = self.files.single and self.files.single.name
        filled: set[int] = set()
        for folder in self.leases.rollout_folders():
            theirs = replace(self.files, folder=folder, single=folder / single if single else None)
            filled |= {int(key) % self.seats for key in read_recorded(theirs).done if key.isdecimal()}
        return filled

    def _block_of(self, index: int) -> int:
        return index % self.seats // self.seats_per_block

    def _seats_of(self, block: int) -> range:
        return range(block * self.seats_per_block, min(self.seats, (block + 1) * self.seats_per_block))
