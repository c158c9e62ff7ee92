"""What a command says when something it cannot help stops it."""

import errno
import io
import sys

import pytest

from atroposlib.cli import boundary


def run_and_raise(error: OSError) -> None:
    """Run a command that ends with `error`."""

    def app(prog_name):
        raise error

    boundary.run(app, "atropos datagen")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_sentence(capsys, number):
    with pytest.raises(SystemExit, match="1"):
        run_and_raise(OSError(number, "No space left on device", "runs/a/settings.json"))
    expected = "atropos datagen: no room on the disk at runs/a/settings.json (No space left on device)"
    assert capsys.readouterr().err.startswith(expected)


def test_an_error_that_names_its_file_is_a_sentence(capsys):
    with pytest.raises(SystemExit, match="1"):
        run_and_raise(PermissionError(errno.EACCES, "Permission denied", "/root/settings.json"))
    assert capsys.readouterr().err == "atropos datagen: cannot use /root/settings.json: Permission denied\n"


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
