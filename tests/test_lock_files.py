"""A lock names its holder, and a disk without locks is not taken for one that is held."""

import errno
import fcntl
import os

import pytest

from atroposlib.errors import LaunchError
from atroposlib.lock_files import HeldError, hold, run_lock


def test_a_held_lock_names_its_holder_and_is_free_when_it_lets_go(tmp_path):
    first = hold(tmp_path / "lock", mode=0o600)
    with pytest.raises(HeldError) as held:
        hold(tmp_path / "lock", mode=0o600)
    assert held.value.pid == str(os.getpid())
    os.close(first)
    os.close(hold(tmp_path / "lock", mode=0o600))


def test_a_holder_on_another_node_is_named_with_its_node(tmp_path):
    descriptor = hold(tmp_path / "lock", mode=0o600)
    (tmp_path / "lock").write_text("17 another-node\n")
    with pytest.raises(HeldError) as held:
        hold(tmp_path / "lock", mode=0o600)
    assert held.value.pid == "17 on another-node"
    os.close(descriptor)


def test_a_full_disk_costs_a_lock_only_the_name_of_its_holder(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    descriptor = hold(tmp_path / "lock", mode=0o600)
    with pytest.raises(HeldError, match="unknown"):
        hold(tmp_path / "lock", mode=0o600)
    with run_lock(tmp_path), pytest.raises(LaunchError, match="in use by process unknown"), run_lock(tmp_path):
        pass
    os.close(descriptor)


def test_a_disk_that_knows_no_locks_is_no_holder(tmp_path, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No locks available"):
        hold(tmp_path / "lock", mode=0o600)
    assert len(os.listdir("/proc/self/fd")) == open_files
