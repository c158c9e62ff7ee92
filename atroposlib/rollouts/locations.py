"""Where a run's files lie, and which of several candidates a command resumes.

A run is either one file the user named (`data_path_to_save_groups`) or shards in `rollouts_dir`. Next to the rollouts:

    X.index      one entry per line of the rollout files: makes a restart quick, rebuilt from them when missing
    X.acked      ids of the groups the trajectory API acknowledged
    X.lock       held by the process that writes; holds its pid
    X.config.yaml, failures.jsonl and the progress file

A file that another program or another environment wrote is never touched; the name gets a `_1`, `_2`, ... instead.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Protocol, Self

from atroposlib.data.rollout_files import FAILURES
from atroposlib.errors import ConfigError, PathError
from atroposlib.json_lines import BYTE_ORDER_MARK
from atroposlib.paths import check_replaceable, expand_path, read_mapping

_LOOKED_AT_BYTES = 1 << 26


class FileSettings(Protocol):
    """Settings of an environment that say where its rollouts lie."""

    run_name: str
    rollouts_dir: str | None
    data_path_to_save_groups: str | None
    progress_path: str | None
    dump_rollouts: bool
    total_groups: int | None


def progress_path(settings: FileSettings) -> Path | None:
    """Where the user wants the progress file; None: next to the rollouts, if there are any."""
    path = settings.progress_path
    return expand_path(path, what="env.progress_path") if path else None


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run. `single` is the rollout file the user named, or None when the run is sharded."""

    folder: Path
    stem: str  # of every file of this run except failures and progress
    env: str
    run: str
    single: Path | None = None
    progress: Path | None = None  # where the user wants it

    @classmethod
    def of(cls, settings: FileSettings, env: str, *, must_write: bool) -> Self | None:
        """Where rollouts of the environment `env` go by its settings; None when none are written.

        ConfigError when they must be and there is no place for them, PathError when the file to write is a folder.
        """
        progress = progress_path(settings)
        if settings.rollouts_dir is None and settings.data_path_to_save_groups:
            path = expand_path(settings.data_path_to_save_groups, what="env.data_path_to_save_groups")
            if path.is_dir():
                raise PathError(
                    f"env.data_path_to_save_groups is {path}, a folder; give a file, or set env.rollouts_dir"
                )
            return cls(path.parent, path.stem, env, settings.run_name, path, progress)
        wanted = settings.dump_rollouts or settings.total_groups is not None or settings.rollouts_dir is not None
        if not must_write and not wanted:
            return None
        if must_write and settings.rollouts_dir is None:
            raise ConfigError("process needs a place for its groups; set --env.data_path_to_save_groups FILE.jsonl")
        folder = expand_path(settings.rollouts_dir or "data", what="env.rollouts_dir")
        return cls(folder, f"{env}_rollouts_{settings.run_name}", env, settings.run_name, None, progress)

    def rollouts(self, shard: int) -> Path:
        """Rollout file number `shard`, from 1; the named file when there is one."""
        return self.single or self.folder / f"{self.stem}_{shard:04d}.jsonl"

    def shards(self) -> dict[int, Path]:
        """The rollout files on disk by number, in the order they were written; compressed shards included."""
        if self.single:
            return {1: self.single} if self.single.exists() else {}
        pattern = re.compile(re.escape(self.stem) + r"_(\d{4,})\.jsonl(\.zst)?")
        found = [(match, path) for path in self.folder.glob("*.jsonl*") if (match := pattern.fullmatch(path.name))]
        return dict(sorted((int(match[1]), path) for match, path in found))

    def sidecar(self, suffix: str) -> Path:
        """`X.<suffix>` of the table above."""
        return self.folder / f"{self.single.name if self.single else self.stem}.{suffix}"

    @property
    def failures(self) -> Path:
        return self.folder / FAILURES

    @property
    def progress_path(self) -> Path:
        return self.progress or self.folder / f"{self.env}_progress_{self.run}.json"


def choose_run(files: RunFiles, *, fresh: bool) -> RunFiles:
    """The run to resume: the newest of ours, or with `fresh` (or none) the first name that is free.

    PathError when the named file is a device, a pipe or a folder.
    """
    if files.single:
        check_replaceable(files.single)
    ours: RunFiles | None = None
    for candidate in _candidates(files):
        existing = candidate.shards()
        if not existing:
            return candidate if fresh or ours is None else ours
        first = min(existing.items())[1]
        if is_ours(first, env=files.env, run=candidate.run) and not _is_begun_by_another(candidate):
            ours = candidate
    raise AssertionError("candidates never end")


def is_ours(path: Path, *, env: str, run: str) -> bool:
    """True when the file is empty or its first line was begun by this environment and run.

    Where the first line is damaged, one of those that follow tells. A compressed shard is ours by its name.
    """
    if path.suffix == ".zst":
        return True
    prefix = line_prefix(env=env, run=run)
    with path.open("rb") as stream:
        start = stream.read(_LOOKED_AT_BYTES).removeprefix(BYTE_ORDER_MARK)
    return prefix.startswith(start[: len(prefix)]) or b"\n" + prefix in start


def _is_begun_by_another(files: RunFiles) -> bool:
    """The named file is still empty, and the settings next to it name another run."""
    settings = files.sidecar("config.yaml")
    if files.single is None or files.single.stat().st_size or not settings.exists():
        return False
    with contextlib.suppress(ConfigError):
        said = read_mapping(settings, expected="settings", what="settings of a run").get("env")
        return isinstance(said, dict) and said.get("run_name", files.run) != files.run
    return False  # damaged, as a machine that failed may leave it: nothing is lost in the empty file


def line_prefix(*, env: str, run: str) -> bytes:
    """The first bytes of every line that this environment and run write."""
    head = json.dumps({"schema_version": 1, "env": env, "run": run}, separators=(",", ":"), ensure_ascii=False)
    return head[:-1].encode()


def _candidates(files: RunFiles) -> Iterator[RunFiles]:
    yield files
    for number in count(1):
        if files.single:
            path = files.single.with_stem(f"{files.single.stem}_{number}")
            yield replace(files, stem=path.stem, single=path)
        else:
            run = f"{files.run}_{number}"
            yield replace(files, stem=f"{files.env}_rollouts_{run}", run=run)
