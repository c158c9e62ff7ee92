"""The one place where a path option becomes a `Path`, and where YAML of users is read.

Users write `~/data`, `$SCRATCH/run` and `${HOME}/x` in YAML, where no shell expands them. Every path option of
every config and command goes through `expand_path`, so no file ever lands in a folder literally called `${HOME}`.
"""

import os
import re
import stat
import tempfile
from pathlib import Path

from atroposlib.errors import ConfigError, DiskError, PathError
from atroposlib.system_limits import limit_reached
from atroposlib.type_definitions import JsonObject

_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[^}]*)\}|(?P<plain>[A-Za-z_][A-Za-z0-9_]*))")


def expand_path(text: str | os.PathLike[str], *, what: str = "path") -> Path:
    """`text` with a leading `~` and every `$VAR` / `${VAR}` replaced; not made absolute.

    Args:
        text: as the user wrote it.
        what: names the option in the error, e.g. `--output`.

    Raises:
        PathError: empty text, an unset variable, an unknown user, or a `$`, `{` or leading `~` that is left over.

    >>> os.environ["RUN"] = "r1"
    >>> expand_path("/data/${RUN}/x.jsonl").as_posix()
    '/data/r1/x.jsonl'
    """
    raw = os.fspath(text)
    if not raw.strip():
        raise PathError(f"{what} is empty; give a file or folder name")

    def value_of(match: re.Match[str]) -> str:
        name = match["braced"] if match["braced"] is not None else match["plain"]
        value = os.environ.get(name)
        if not value:
            raise PathError(
                f"{what} is {raw!r}, but the environment variable {name!r} is not set; set it or write the path in full"
            )
        return value

    expanded = os.path.expanduser(_VARIABLE.sub(value_of, raw))
    if expanded.startswith("~") or any(odd in expanded for odd in "${}\0"):
        raise PathError(
            f"{what} is {raw!r}, which resolves to {expanded!r}: it still holds '~', '$', braces or a null byte; "
            "use ~/, $VAR or ${VAR} with variables that are set"
        )
    return Path(expanded)


def writable_dir(text: str | os.PathLike[str], *, what: str = "folder") -> Path:
    """The expanded folder, created when missing and shown to be writable.

    PathError: it cannot be created or nothing can be written in it. DiskError: only now, as the disk is full.
    """
    folder = expand_path(text, what=what)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        raise unusable(f"{what} {folder} cannot be written", error, "choose another") from error
    return folder


def unusable(what: str, error: OSError, otherwise: str) -> PathError:
    """Return the error of a file or folder that cannot be used, with what to do; a DiskError where its path is right.

    >>> str(unusable("/data cannot be written", PermissionError(13, "Permission denied"), "choose another"))
    '/data cannot be written: Permission denied; choose another'
    """
    if (limit := limit_reached(error)) is not None:
        return DiskError(f"{what}: {limit}")
    return PathError(f"{what}: {error.strerror or error}; {otherwise}")


def remedy(error: OSError, otherwise: str = "choose another") -> str:
    """Return what to do about a file that cannot be used: of one that another user owns, who that is."""
    if not isinstance(error, PermissionError) or error.filename is None:
        return otherwise
    path = Path(os.fsdecode(error.filename)).absolute()
    there = next((each for each in (path, *path.parents) if os.path.exists(each)), Path("/"))
    owner, user = (_user(number) for number in (there.stat().st_uid, os.geteuid()))
    return (
        f"{there} belongs to {owner}, and this is {user}: give both users read and write access to the whole folder "
        "(chmod), or resume in a copy of it (cp -r)"
    )


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def write_text_atomic(path: Path, text: str) -> None:
    """Replace `path` as a whole: readers see the old or the new content, never a part.

    PathError: it is no regular file. OSError, with `path` as its file name: it cannot be written.
    """
    check_replaceable(path)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = os.fspath(path), None
        raise


def shown(path: Path) -> str:
    """The path as text that every file takes: names on a disk need not be UTF-8."""
    return str(path).encode(errors="replace").decode()


def check_replaceable(path: Path, *, what: str = "") -> None:
    """PathError unless a regular file, or nothing, is at `path`, a link to one included.

    A file that is renamed over a device, as root may, takes its place for everybody.
    """
    if path.exists() and not path.is_file():
        name = f"{what} {path}" if what else str(path)
        raise PathError(f"{name} is {kind_of(path)}; only regular files are written and replaced, give a file name")


def kind_of(path: Path) -> str:
    """The kind of thing at `path` that is no regular file, as a sentence names it."""
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    return kinds.get(stat.S_IFMT(path.stat().st_mode), "a device")


def sync_to_disk(path: Path) -> None:
    """Bring a file's content, or the names in a folder, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_mapping(path: Path, *, expected: str, what: str, may_be_empty: bool = False) -> JsonObject:
    """The mapping at the top of a YAML file that a user wrote.

    Args:
        expected: what the file should hold, for the error about something else.
        what: the file itself, e.g. `a recipe`, for the error about a path that cannot be read.
        may_be_empty: an empty file holds {}.

    ConfigError: the file cannot be read, is not YAML, or holds something else.
    """
    import yaml  # few commands read any

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the path of {what}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None and may_be_empty:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, expected {expected}")
    return content
