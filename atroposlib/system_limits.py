"""Limits that the system sets a process: open files, the size of a file, the room on a disk."""

import contextlib
import errno
import resource
from collections.abc import Iterator

from atroposlib.errors import DiskError, LaunchError

FEWEST_DESCRIPTORS, MOST_DESCRIPTORS = 32, 1 << 16  # with fewer, event loops abort or wait for ever


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to what the system allows this process; return it.

    LaunchError: it is too low to work with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit below its hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if soft == resource.RLIM_INFINITY else soft
    if most < FEWEST_DESCRIPTORS:
        raise LaunchError(f"no more than {most} files and connections may be open; raise `ulimit -n` to 1024 or more")
    return most


def limit_reached(error: OSError) -> str | None:
    """Return which limit of the system an error met, and what to do about it; None: it is another error.

    >>> limit_reached(OSError(errno.ENOSPC, "No space left on device"))
    'no room on the disk (No space left on device); free some space'
    """
    at = f" at {error.filename}" if error.filename else ""
    match error.errno:
        case errno.ENOSPC:
            return f"no room on the disk{at} ({error.strerror}); free some space"
        case errno.EDQUOT:
            return f"the disk quota is used up{at} ({error.strerror}); free some of yours, or have it raised"
        case errno.EFBIG:
            most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            if most == resource.RLIM_INFINITY:
                return f"its file system takes no file of this size ({error.strerror}); use another"
            return f"no file may grow beyond {most} bytes here ({error.strerror}); raise `ulimit -f`"
        case errno.EMFILE:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"no more than {most} files and connections may be open ({error.strerror}); raise `ulimit -n`"
        case errno.ENFILE:
            return f"too many files are open on this machine ({error.strerror}); end what holds them"
        case _:
            return None


@contextlib.contextmanager
def told_limits() -> Iterator[None]:
    """Raise DiskError, a sentence, for an OSError in the block that met a limit of the system."""
    try:
        yield
    except OSError as error:
        if (sentence := limit_reached(error)) is None:
            raise
        raise DiskError(f"{sentence}, and give the same command again") from error
