"""Rollout files made of others: several partial runs as one without duplicates; train, validation and test sets.

A split is by problem, stratified by task and difficulty, seeded. Groups with the same item key or the same prompt are
one problem and never part, also over files.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atroposlib.data.lazy_group import hash64, parse_lazily
from atroposlib.data.output import ROLLOUTS, JsonlWriter, check_output, refuse_inputs, sole_writer, written_whole
from atroposlib.data.policy import pass_rates
from atroposlib.data.report import require_groups
from atroposlib.data.rollout_files import Line, check_copied, find_rollout_files, sound_lines
from atroposlib.data.set_aside import SetAside
from atroposlib.data.table import Advance, Table, ignore, index_path, open_table
from atroposlib.errors import ConfigError, DataError, RowError
from atroposlib.paths import writable_dir
from atroposlib.type_definitions import Array


@dataclass(frozen=True)
class Merged:
    """Counts of a merge."""

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
    with sole_writer(target, overwrite=overwrite), written_whole(target) as writer:
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


NAMES = ("train", "val", "test")


def split_rollouts(
    paths: str | Path | Iterable[str | Path],
    folder: str | Path,
    *,
    shares: Sequence[float] = (0.7, 0.2, 0.1),
    seed: int = 0,
    overwrite: bool = False,
    strict: bool = False,
    advance: Advance = ignore,
    assign: Callable[[Table, Sequence[float], int], Array] | None = None,
) -> dict[str, int]:
    """Write `train.jsonl`, `val.jsonl` and `test.jsonl` of unchanged rollout lines; returns groups by split.

    Args:
        shares: of problems, adding up to 1; a share of 0 leaves that file out, and an earlier one is removed.
        assign: gives the split of each group; None: `assign_splits`.

    Raises:
        ConfigError: shares do not add up.
        PathError: a file exists and `overwrite` is not set.
        DataError: no group at all, or with `strict` a damaged line.
    """
    if len(shares) != len(NAMES) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ConfigError(f"--shares {list(shares)}: expected {len(NAMES)} numbers from 0 that add up to 1")
    target = writable_dir(folder, what="--output-dir")
    outputs = [check_output(target / f"{name}.jsonl", what="--output-dir", overwrite=overwrite) for name in NAMES]
    table = open_table(paths, advance, strict=strict, with_doubles=True)
    refuse_inputs(outputs, table.files, what="--output-dir")
    require_groups(table)
    odd = SetAside(strict=strict)
    parts = (assign or assign_splits)(table, shares, seed)
    with ExitStack() as stack:
        for path in outputs:
            stack.enter_context(sole_writer(path, overwrite=overwrite))
        writers = [
            stack.enter_context(written_whole(path)) if share else None
            for path, share in zip(outputs, shares, strict=True)
        ]
        for row, line in enumerate(lines_of(table, advance)):
            try:
                check_copied(line)
            except RowError as error:
                odd.add(error)
                parts[row] = len(NAMES)
                continue
            writer = writers[parts[row]]
            assert isinstance(writer, JsonlWriter)
            writer.write_line(line.data)
    odd.warn()
    for path in (path for path, share in zip(outputs, shares, strict=True) if not share):
        path.unlink(missing_ok=True)  # it shares problems with the new ones
        index_path(path).unlink(missing_ok=True)
    counts = Counter(parts.tolist())
    return {name: counts[code] for code, name in enumerate(NAMES)}


def assign_splits(table: Table, shares: Sequence[float], seed: int) -> Array:
    """[groups] index into `shares` for every group.

    Within a stratum (task and difficulty) problems are ordered by chance and dealt out by cumulated share; the
    rounding runs on over the strata, so small strata do not all lose their test problem.
    """
    problems = problems_of(table)
    rate = pass_rates(table, 0.0)
    strata: dict[tuple[str, int], list[int]] = {}
    for group in np.unique(problems, return_index=True)[1].tolist():
        row = table.groups[group]
        solved = float(rate[row["first"]]) if row["responses"] else 0.0
        level = 0 if not solved > 0 else 3 if solved == 1 else 1 if solved < 0.5 else 2  # 0: also never judged (NaN)
        strata.setdefault((table.tasks[row["task"]], level), []).append(group)
    split_of: dict[int, int] = {}
    counts = np.zeros(len(shares))
    for stratum in sorted(strata):
        for group in sorted(strata[stratum], key=lambda each: chance(table, each, seed)):
            part = int(np.argmax(np.array(shares) * (len(split_of) + 1) - counts))
            counts[part] += 1
            split_of[int(problems[group])] = part
    return np.array([split_of[problem] for problem in problems.tolist()])


def problems_of(table: Table) -> Array:
    """[groups] a number per problem: the smallest row reachable over shared item keys and shared prompts."""
    parent = list(range(len(table.groups)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for column in ("item", "prompt"):
        first: dict[int, int] = {}
        for row, value in enumerate(table.groups[column].tolist()):
            if not value:  # no prompt was recorded
                continue
            if value in first:
                low, high = sorted((root(first[value]), root(row)))
                parent[high] = low
            first.setdefault(value, row)
    return np.array([root(row) for row in range(len(parent))])


def chance(table: Table, group: int, seed: int) -> int:
    """Return what orders the groups of a stratum; it follows from the item and the seed."""
    return hash64(f"{seed}:{table.groups['item'][group]}".encode())


def lines_of(table: Table, advance: Advance) -> Iterator[Line]:
    """The line of each group row."""
    everything = np.ones(len(table.responses), bool)
    return (chosen.line for chosen in table.read_groups(table.groups, everything, advance))
