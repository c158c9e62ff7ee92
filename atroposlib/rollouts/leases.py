"""Leases: which member of a shared run rolls out which block of problems, decided by files in a folder all can see.

    b000012.1        made by the member that took block 12 first; making it fails for everybody else
    b000012.2        made by the one that took the block over; the highest number holds it
    pulse.<member>   rewritten by a living member; says where its rollouts are
    member.<member>  made by the first that uses this name; says where its rollouts are, seen from here

Block files are only ever added, so no reader sees a change half done. A member is silent when its pulse has not
changed for `timeout_s` of the watcher's own clock; the clocks of the nodes need not agree.
"""

import json
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from atroposlib.errors import LaunchError
from atroposlib.paths import write_text_atomic

logger = logging.getLogger(__name__)

PULSES_PER_TIMEOUT = 6


@dataclass(frozen=True)
class Holder:
    """Who has a block, and the how-manieth holder that is (from 1)."""

    member: str
    term: int


@dataclass
class _Watched:
    """A pulse as this process has seen it."""

    text: str | None
    since: float  # monotonic seconds
    has_changed: bool = False


class Leases:
    """The blocks 0 to `blocks` - 1, as one member sees them. Methods block on the disk; any one thread may call."""

    def __init__(self, folder: Path, member: str, *, blocks: int, timeout_s: float, rollouts: Path) -> None:
        """
        Args:
            rollouts: where this member's rollout files are.

        Raises:
            LaunchError: the name belongs to a member whose rollouts are elsewhere.
        """
        self.member = member
        self.timeout_s = timeout_s
        self._folder = folder
        self._blocks = blocks
        self._rollouts = rollouts
        self._next_new = 0
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
            if name.startswith("b"):
                block, _, term = name[1:].partition(".")
                terms[int(block)] = max(terms.get(int(block), 0), int(term))
        return {block: Holder(self._member_of(block, term), term) for block, term in terms.items()}

    def take_new(self) -> int | None:
        """A block that nobody has taken yet, now ours; None: all are taken."""
        while self._next_new < self._blocks:
            block, self._next_new = self._next_new, self._next_new + 1
            if self.take(block, term=1):
                return block
        return None

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
        pulses = [json.loads(path.read_text("utf-8")) for path in sorted(self._folder.glob("pulse.*"))]
        return [Path(pulse["rollouts"]) for pulse in pulses]

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
        if watched is None:
            watched = self._watched[member] = _Watched(text, time.monotonic())
        elif text != watched.text:
            watched = self._watched[member] = _Watched(text, time.monotonic(), has_changed=True)
        return watched

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
