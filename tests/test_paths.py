import errno
import tempfile

import pytest

from atroposlib.errors import DiskError, PathError
from atroposlib.paths import expand_path, writable_dir, write_text_atomic


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("UNSET_VARIABLE", raising=False)


@pytest.mark.parametrize("text", ["~/x", "$HOME/x", "${HOME}/x"])
def test_home_is_expanded_in_every_spelling(text, tmp_path):
    assert expand_path(text) == tmp_path / "x"


@pytest.mark.parametrize(
    "text", ["$UNSET_VARIABLE/x", "${UNSET_VARIABLE}", "a/${", "a/{b}", "a/$", "", "  ", "~nobody-here/x", "a\0b"]
)
def test_what_cannot_be_resolved_is_refused_and_named(text):
    with pytest.raises(PathError, match="--output"):
        expand_path(text, what="--output")


def test_an_unset_variable_is_named():
    with pytest.raises(PathError, match="UNSET_VARIABLE"):
        expand_path("${UNSET_VARIABLE}/x")


def test_writable_dir_creates_parents(tmp_path):
    assert writable_dir(tmp_path / "a" / "b").is_dir()


def test_writable_dir_refuses_a_file(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(PathError, match="cannot be written"):
        writable_dir(tmp_path / "f")


def test_a_full_disk_is_no_wrong_path(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(
        DiskError, match=r"run_dir .* cannot be written: no room on the disk .*; free some space"
    ) as told:
        writable_dir(tmp_path, what="run_dir")
    assert told.value.exit_code == 1


def test_write_text_atomic_leaves_no_temporary_file(tmp_path):
    write_text_atomic(tmp_path / "x.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_an_error_of_write_text_atomic_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        write_text_atomic(tmp_path / "missing" / "x.json", "{}")
    assert error.value.filename == str(tmp_path / "missing" / "x.json")
