"""Several partial runs into one rollout file, without duplicates."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from atroposlib.data.lazy import hash64, parse_lazily
from atroposlib.data.output import ROLLOUTS, JsonlWriter, check_output, written_whole
from atroposlib.data.rollout_files import check_copied, find_rollout_files, sound_lines
from atroposlib.data.set_aside import SetAside
from atroposlib.data.table import Advance, ignore
from atroposlib.errors import DataError, RowError


@dataclass(frozen=True)
class Merged:
    """What a merge wrote."""

    output: str
    files: int
    groups: int
    duplicates: int
    set_aside: SetAside


def merge_rollouts(
    paths: str | Path | Iterable[str | Path],
    output: str | Path,
    *,
    overwrite: bool = False,
    strict: bool = False,
    advance: Advance = ignore,
) -> Merged:
    """Copy every group once, the earliest of duplicates, in reading order and byte by byte.

    Groups are the same when their `group_id` is, or their recorded responses are (a resent group may have got
    another id). Memory: 16 bytes and two set entries a group.

    Raises:
        PathError: an input is missing, or the output exists.
        DataError: there is no group at all, or with `strict` a damaged line; nothing is written.
    """
    target = check_output(output, suffixes=ROLLOUTS, overwrite=overwrite)
    files = find_rollout_files(paths)
    seen: set[int] = set()
    groups = duplicates = 0
    odd = SetAside(strict=strict)
    with written_whole(target) as writer:
        assert isinstance(writer, JsonlWriter)
        for path in files:
            for line in sound_lines(path, odd):
                advance(line.size)
                try:
                    group = parse_lazily(line)
                    check_copied(line)
                except RowError as error:
                    odd.add(error)
                    continue
                keys = {hash64(b"".join(map(bytes, group.tokens or group.messages or [])) + str(group.scores).encode())}
                if group.group_id is not None:
                    keys.add(hash64(f"id {group.group_id}".encode()))
                if keys & seen:
                    duplicates += 1
                else:
                    groups += 1
                    writer.write_line(line.data)
                seen |= keys
        if not groups:
            raise DataError(f"there is no group to merge; nothing was written. Set aside: {odd}")
    odd.warn()
    return Merged(str(target), len(files), groups, duplicates, odd)
