"""Several partial runs into one rollout file, without duplicates."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from atroposlib.data.lazy import hash64, parse_lazily
from atroposlib.data.output import ROLLOUTS, JsonlWriter, check_output, written_whole
from atroposlib.data.rollout_files import find_rollout_files, read_lines
from atroposlib.data.table import Advance, ignore


@dataclass(frozen=True)
class Merged:
    """What a merge wrote."""

    output: str
    files: int
    groups: int
    duplicates: int


def merge_rollouts(
    paths: str | Path | Iterable[str | Path],
    output: str | Path,
    *,
    overwrite: bool = False,
    advance: Advance = ignore,
) -> Merged:
    """Copy every group once, the earliest of duplicates, in reading order and byte by byte.

    Groups are the same when their `group_id` is, or their recorded responses are (a resent group may have got
    another id). Memory: 16 bytes and two set entries a group.

    Raises:
        PathError: an input is missing, or the output exists.
        DataError: a damaged line; nothing is written.
    """
    target = check_output(output, suffixes=ROLLOUTS, overwrite=overwrite)
    files = find_rollout_files(paths)
    seen: set[int] = set()
    groups = duplicates = 0
    with written_whole(target) as writer:
        assert isinstance(writer, JsonlWriter)
        for path in files:
            for line in read_lines(path):
                advance(line.size)
                group = parse_lazily(line)
                if group is None:
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
    return Merged(str(target), len(files), groups, duplicates)
