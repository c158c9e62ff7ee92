"""What a command says when something it cannot help stops it."""

import errno
import io
import re
import subprocess
import sys

import pytest

from atroposlib.cli import boundary
from atroposlib.errors import AtroposError, ConfigError, DataError, DiskError, LaunchError, PathError


def run_and_raise(error: Exception) -> None:
    """Run a command that ends with `error`."""

    def app(prog_name):
        raise error

    boundary.run(app, "atropos datagen")  # pyright: ignore[reportArgumentType]


LIMITS = {
    "disk": (errno.ENOSPC, r"no room on the disk at runs/a.json \(why\); free some space"),
    "quota": (errno.EDQUOT, r"the disk quota is used up at runs/a.json \(why\); free some of yours, or have it raised"),
    "size of a file": (errno.EFBIG, r"(no file may grow beyond \d+ bytes here|its file system takes no file of this)"),
    "open files": (errno.EMFILE, r"no more than \d+ files and connections may be open \(why\); raise `ulimit -n`"),
    "open files of all": (errno.ENFILE, r"too many files are open on this machine \(why\)"),
}


@pytest.mark.parametrize(("number", "said"), LIMITS.values(), ids=LIMITS)
def test_a_limit_of_the_system_is_a_sentence(capsys, number, said):
    with pytest.raises(SystemExit, match="1"):
        run_and_raise(OSError(number, "why", "runs/a.json"))
    assert re.match("atropos datagen: " + said, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("kind", "code"), [(ConfigError, 2), (PathError, 2), (DiskError, 1), (DataError, 1), (LaunchError, 1)]
)
def test_the_exit_code_tells_a_command_to_correct_from_one_that_failed(capsys, kind: type[AtroposError], code):
    with pytest.raises(SystemExit, match=str(code)):
        run_and_raise(kind("what was found"))
    assert capsys.readouterr().err == "atropos datagen: what was found\n"


def test_an_error_that_names_its_file_is_a_sentence(capsys):
    with pytest.raises(SystemExit, match="1"):
        run_and_raise(IsADirectoryError(errno.EISDIR, "Is a directory", "/home/ann/settings.json"))
    assert capsys.readouterr().err == "atropos datagen: cannot use /home/ann/settings.json: Is a directory\n"


def test_a_file_of_another_user_is_named_with_its_owner(capsys):
    with pytest.raises(SystemExit, match="1"):
        run_and_raise(PermissionError(errno.EACCES, "Permission denied", "/etc/not-there/settings.json"))
    said = capsys.readouterr().err
    assert said.startswith(
        "atropos datagen: cannot use /etc/not-there/settings.json: Permission denied; /etc belongs to root"
    )
    assert said.endswith(" or resume in a copy of it (cp -r)\n")


def test_other_errors_of_the_system_keep_their_traceback():
    with pytest.raises(OSError, match="no such"):
        run_and_raise(OSError(errno.ENOENT, "no such file"))


def test_what_a_terminal_cannot_show_is_escaped(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    boundary.run(lambda prog_name: print("n\u00e9 \ud800"), "atropos data")  # pyright: ignore[reportArgumentType]
    assert shown.getvalue() == b"n\\xe9 \\ud800\n"


def test_ctrl_c_is_a_sentence(monkeypatch, capsys):
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["atropos data"])
    with pytest.raises(SystemExit, match="130"):
        boundary.run(boundary.command(stopped), "atropos data")
    assert capsys.readouterr().err.strip() == "atropos data: stopped; nothing half-written is left"


NEW_WHERE_NO_FILE_MAY_GROW = """
import resource, sys
from atroposlib.cli.main import main
sys.dont_write_bytecode = True  # else its files would be cut off, too
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
sys.argv = ["atropos", "new", "env", "sums", "--folder", sys.argv[1]]
main()
"""


def test_a_file_to_begin_with_is_written_whole_or_not_at_all(tmp_path):
    command = [sys.executable, "-c", NEW_WHERE_NO_FILE_MAY_GROW, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no file may grow beyond 100 bytes here" in done.stderr
    assert list(tmp_path.iterdir()) == []
