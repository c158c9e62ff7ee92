"""Weights exported for engines: `<save_path>/engine/weights_<version>`, and `current`, a link to the newest.

An engine that is started from the link serves the newest weights again when it has to be restarted.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from example_trainer.policy import Policy

_KEPT = 2


def exports_folder(save_path: Path) -> Path:
    """Where the exports of a run lie."""
    return save_path / "engine"


def current_link(exports: Path) -> Path:
    """The link to the newest export."""
    return exports / "current"


def first_link(exports: Path, model: Path) -> Path:
    """The link, made to point at `model` unless an earlier start of the run left exported weights behind it."""
    link = current_link(exports)
    if not link.exists():
        exports.mkdir(parents=True, exist_ok=True)
        replace_link(link, model)
    return link


def replace_link(link: Path, target: Path) -> None:
    """Point `link` at a folder, in one moment."""
    making = link.with_name(f".{link.name}.making")
    making.unlink(missing_ok=True)
    making.symlink_to(target.resolve(), target_is_directory=True)
    os.replace(making, link)


def save_folder(policy: "Policy", exports: Path, version: int) -> Path:
    """The policy's weights as `<exports>/weights_<version>`, which `current` then points at."""
    target = exports / f"weights_{version:08d}"
    write_whole(target, policy.save_merged)
    replace_link(current_link(exports), target)
    return target


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Build a folder beside its place, then rename it."""
    making = target.with_name(f".making.{target.name}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    write(making)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(making, target)


def keep_newest(exports: Path, pattern: str) -> None:
    """Delete all but the exports of this pattern that were written last; a resumed run begins at a smaller version."""
    for old in sorted(exports.glob(pattern), key=lambda path: path.stat().st_mtime_ns)[:-_KEPT]:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
