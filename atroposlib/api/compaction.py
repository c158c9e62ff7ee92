"""Which segment files are worth rewriting, so that one group that stays does not keep 64 MB of consumed ones. Pure.

Groups are consumed in about the order of arrival, so most files empty by themselves and the dead bytes of the oldest
few are no reason to act. Only when all files together hold more dead bytes than a slack are the emptiest ones
rewritten, and none that is more than half alive: what is written stays below what is freed. Disk use therefore stays
below the larger of `live + slack` and `2 * live`, plus the file being written.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """A file that is only read any more: its size, and what the groups that are needed take in a file of their own."""

    number: int
    live_bytes: int
    size: int

    @property
    def dead_bytes(self) -> int:
        """Bytes that a rewrite would free."""
        return max(0, self.size - self.live_bytes)


def worth_rewriting(files: Iterable[Usage], slack: int) -> list[int]:
    """Numbers of the files to rewrite, emptiest first, until at most `slack` dead bytes are left.

    >>> worth_rewriting([Usage(1, 60, 64), Usage(2, 1, 64), Usage(3, 30, 64)], slack=50)
    [2]
    """
    files = sorted(files, key=lambda file: file.live_bytes / max(1, file.size))
    dead, chosen = sum(file.dead_bytes for file in files), []
    for file in files:
        if dead <= slack or 2 * file.live_bytes > file.size:
            break
        chosen.append(file.number)
        dead -= file.dead_bytes
    return chosen
