"""Folders of programs that one user runs at the same time: none of them sees those of the others.

They lie in one folder of the user. Bubblewrap shows a program that folder with nothing but its own in it, and no other
process, whose variables and working folder it could read. All else stays as it is: user, files, network, devices. This
is no sandbox: as root a program can still read the device of the disk.
"""

import contextlib
import errno
import fcntl
import functools
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from atroposlib.errors import PathError
from atroposlib.lock_files import try_lock
from atroposlib.sandbox.programs import PATH

logger = logging.getLogger(__name__)

TRIAL_S = 30.0

_held: dict[Path, int] = {}
"""Descriptors of the folders in use, each with the lock that its process has for as long as it lives."""


def new_folder() -> Path:
    """Make an empty folder for a program; PathError where somebody else has made the one that it shall lie in.

    The first one of a process also removes what killed processes of this user left there.
    """
    above = Path(tempfile.gettempdir()).resolve() / f"atropos-agents-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        above.mkdir(mode=0o700)
    found = above.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PathError(f"{above} is no folder of this user alone; remove it, or set TMPDIR to a folder of yours")
    _remove_left(above)
    with _locked(above, fcntl.LOCK_SH):
        folder = Path(tempfile.mkdtemp(dir=above))
        _held[folder] = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            try_lock(_held[folder])
    return folder


@contextlib.contextmanager
def _locked(above: Path, how: int) -> Iterator[None]:
    """Keep removers (LOCK_EX) from folders that makers (LOCK_SH) have not locked yet, where the disk has locks."""
    descriptor = os.open(above, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # then nothing below it can be locked, and nobody removes anything
            fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


@functools.cache
def _remove_left(above: Path) -> None:
    """Remove, in a thread, the folders whose processes have ended without doing it."""
    left: list[tuple[Path, int]] = []
    try:
        with _locked(above, fcntl.LOCK_EX):
            for folder in above.iterdir():
                try:
                    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                except OSError:  # its agent forbade it
                    continue
                if try_lock(descriptor):
                    left.append((folder, descriptor))
                else:
                    os.close(descriptor)
    except OSError as error:
        logger.warning("folders that killed agents left in %s stay there: %s", above, error)

    def remove() -> None:
        for folder, descriptor in left:
            remove_folder(folder)
            os.close(descriptor)

    if left:
        logger.info("removing %d folders of agents whose process was killed: %s", len(left), above)
        threading.Thread(target=remove, name="removing folders of agents", daemon=True).start()


def remove_folder(folder: Path) -> None:
    """Remove the folder of a program that has ended, however deep it is and whatever the program forbade in it."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        removal = ["sh", "-c", 'chmod -R u+rwX -- "$1"; rm -rf -- "$1"', "sh", str(folder)]
        ended = subprocess.run(removal, check=False, stdin=subprocess.DEVNULL, capture_output=True)
        if folder.exists():
            logger.warning("%s cannot be removed: %s", folder, ended.stderr.decode(errors="replace")[-300:].strip())
    if (descriptor := _held.pop(folder, None)) is not None:
        os.close(descriptor)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make such a folder, and remove it at the end."""
    folder = new_folder()
    try:
        yield folder
    finally:
        remove_folder(folder)


def apart(arguments: Sequence[str], folder: Path, path: str | None = None) -> list[str]:
    """Return the command that runs a program in its folder, which `new_folder` made, without sight of the others'.

    Args:
        path: where programs are looked up; None: the PATH of this process.

    Raises:
        OSError: the program is not there, or bubblewrap is not.
    """
    if (bwrap := shutil.which("bwrap", path=PATH)) is None:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), "bwrap")
    program = os.fspath(arguments[0])
    place = folder / program
    if shutil.which(place if "/" in program else program, path=path) is None:
        number = errno.EACCES if "/" in program and place.exists() else errno.ENOENT
        raise OSError(number, os.strerror(number), program)
    above = str(folder.parent)
    own = ["--tmpfs", above, "--bind", str(folder), str(folder), "--remount-ro", above, "--chdir", str(folder)]
    # with these root could take the cover away, or find what is below it
    less = [word for name in ("SYS_ADMIN", "DAC_READ_SEARCH") for word in ("--cap-drop", f"CAP_{name}")]
    view = ["--bind", "/", "/", "--dev-bind", "/dev", "/dev", "--unshare-pid", "--proc", "/proc", *own, *less]
    return [bwrap, "--die-with-parent", *view, "--", *arguments]


_tried: list[bool] = []
_trying = threading.Lock()


def can_part() -> bool:
    """Tell if programs can be kept apart on this machine, by trying it once; a warning says why not."""
    with _trying:  # several agents ask at the same time
        if not _tried:
            _tried.append(_try_to_part())
        return _tried[0]


def _try_to_part() -> bool:
    is_apart, reason = False, ""
    with temporary_folder() as own, temporary_folder() as other:
        try:
            trial = apart(["sh", "-c", 'test ! -e "$1" && echo > own', "sh", str(other)], own)
            ended = subprocess.run(trial, check=False, capture_output=True, timeout=TRIAL_S, stdin=subprocess.DEVNULL)
            reason = ended.stderr.decode(errors="replace").strip() or f"exit code {ended.returncode}"
            is_apart = ended.returncode == 0 and (own / "own").exists()
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
    if not is_apart:
        logger.warning(
            "agents that run at the same time can read each other's folders, as bubblewrap cannot keep them apart here "
            "(%s); install it and allow user namespaces, or run agents in containers",
            reason[-300:],
        )
    return is_apart
