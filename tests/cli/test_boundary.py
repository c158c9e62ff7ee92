"""What a command says when something it cannot help stops it."""

import errno

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


def test_other_errors_of_the_system_keep_their_traceback():
    with pytest.raises(OSError, match="no such"):
        run_and_raise(OSError(errno.ENOENT, "no such file"))
