"""Weights exported for engines: `<save_path>/engine/weights_<version>`, and a link to the newest.

An engine that is started from the link serves the newest weights again when it has to be restarted. Folders, GGUF files
and adapters have a link each, as no engine loads those of another.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atroposlib.example_trainer.policy import Policy

CURRENT = "current"
CURRENT_GGUF = "current.gguf"
CURRENT_ADAPTER = "current_adapter"
FOLDERS, GGUF_FILES, ADAPTERS = r"weights_(\d+)", r"weights_(\d+)\.gguf", r"adapter_(\d+)"
"""Names of exports, in full: a copy that a user keeps next to them (`weights_00000005_good`) is not ours to delete."""
ADAPTER_NAME = "policy"
"""Name of the adapter in training at vLLM, for which the environment asks."""
_KEPT = 2


def exports_folder(save_path: Path) -> Path:
    """Where the exports of a run lie."""
    return save_path / "engine"


def first_link(exports: Path, model: Path) -> Path:
    """The link, made to point at `model` unless an earlier start of the run left exported weights behind it."""
    link = exports / CURRENT
    if not link.exists():
        exports.mkdir(parents=True, exist_ok=True)
        replace_link(link, model)
    return link


def replace_link(link: Path, target: Path) -> None:
    """Point `link` at a folder or file, in one moment."""
    making = link.with_name(f".{link.name}.making")
    making.unlink(missing_ok=True)
    making.symlink_to(target.resolve(), target_is_directory=target.is_dir())
    os.replace(making, link)


def version_behind(link: Path) -> str | None:
    """The version of the exported weights that the link points at; None for a model that the run did not write."""
    export = link.resolve()
    named = re.fullmatch(f"{FOLDERS}|{GGUF_FILES}", export.name)
    if named is None or export.parent != link.parent.resolve():
        return None
    return str(int(named[1] or named[2]))


def save_folder(policy: "Policy", exports: Path, version: int) -> Path:
    """The policy's weights as `<exports>/weights_<version>`, which `current` then points at."""
    target = exports / f"weights_{version:08d}"
    write_whole(target, policy.save_merged)
    replace_link(exports / CURRENT, target)
    return target


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Build a folder next to its place, then rename it."""
    making = target.with_name(f".making.{target.name}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    write(making)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(making, target)


def keep_newest(exports: Path, names: str) -> None:
    """Delete all but the exports so named that were written last; a resumed run begins at a smaller version."""
    ours = [path for path in exports.iterdir() if re.fullmatch(names, path.name)]
    for old in sorted(ours, key=lambda path: path.stat().st_mtime_ns)[:-_KEPT]:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
