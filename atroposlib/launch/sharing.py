"""Count what the members of a shared run (`share.member`) have recorded together."""

import contextlib
import logging
import os
from collections import Counter
from pathlib import Path

from atroposlib.launch.config import DatagenConfig
from atroposlib.paths import writable_dir
from atroposlib.rollouts.ledger import recorded_items
from atroposlib.rollouts.locations import RunFiles

logger = logging.getLogger(__name__)


def rollout_folders(config: DatagenConfig) -> list[Path]:
    """The folders that hold the run's rollouts: one, or one of each member that has any."""
    run_dir = Path(config.run_dir)
    if not config.share.member:
        return [run_dir / "rollouts"]
    return sorted({shard.parent for shard in run_dir.glob("members/*/rollouts/*_rollouts_*.jsonl*")})


def link_rollouts(config: DatagenConfig) -> None:
    """Link every rollout file of this process in the folder `links`; links of its that lead nowhere go away.

    A member's name stands in its links, as the files of all members are called alike. What is no link stays.
    """
    if config.links is None:
        return
    links, folder = writable_dir(config.links, what="links"), config.work_dir / "rollouts"
    named = f"_rollouts_{config.name}_"
    member = f"{config.share.member}_" if config.share.member else ""
    for link in links.glob(f"*{named}{member}*.jsonl*"):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
    for shard in folder.glob(f"*{named}*.jsonl*"):
        head, tail = shard.name.split(named, 1)
        with contextlib.suppress(FileExistsError):
            (links / f"{head}{named}{member}{tail}").symlink_to(os.path.relpath(shard, links))


def has_recorded(config: DatagenConfig) -> bool:
    """A group, or the rejection of one, is on disk."""
    run_dir = Path(config.run_dir)
    folders = [*run_dir.glob("members/*/rollouts"), run_dir / "rollouts"]
    kinds = ("*_rollouts_*.jsonl*", "*_rollouts_*.index")
    return any(path.stat().st_size for folder in folders for kind in kinds for path in folder.glob(kind))


def groups_missing(config: DatagenConfig) -> int:
    """Problems of a shared run that no member has recorded yet; the files are only read."""
    seats = Counter(
        int(key) % config.problems
        for folder in rollout_folders(config)
        for index in folder.glob(f"*_rollouts_{config.name}.index")
        for key in recorded_items(RunFiles(folder, index.stem, env="", run=config.name))
        if key.isdecimal()
    )
    twice = [seat for seat, groups in seats.items() if groups > 1]
    if twice:
        logger.warning("problems recorded by two members: %s; a member was frozen while it wrote", sorted(twice))
    return config.problems - len(seats)
