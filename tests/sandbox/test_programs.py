"""What needs no sandbox: paths, archives of strangers, and refusals where one could not hold."""

import shutil

import pytest

from atroposlib.sandbox import programs, sandbox
from atroposlib.sandbox.sandbox import Sandbox
from atroposlib.sandbox.seccomp import ARCHITECTURES, filter_program
from atroposlib.sandbox.workers import SandboxError


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "a\nb", "a\0b"])
def test_no_file_is_given_or_taken_outside_of_the_work_folder(name):
    with pytest.raises(ValueError, match="is no path below /work"):
        programs.Program(programs.Tools("/usr/bin/bwrap", False), ["true"], files={name: ""})
    with pytest.raises(ValueError, match="is no path below /work"):
        programs.Program(programs.Tools("/usr/bin/bwrap", False), ["true"], keep=[name])


def test_a_tar_of_a_stranger_gives_plain_files_of_the_names_asked_for():
    assert list(programs._regular_files(b"\xff" * 2000, ["x"])) == []
    assert list(programs._regular_files(b"", ["x"])) == []


def test_without_bubblewrap_nothing_is_run(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    sandbox.require_host.cache_clear()
    with pytest.raises(SandboxError, match="bubblewrap is missing; install the package bubblewrap"):
        Sandbox()
    sandbox.require_host.cache_clear()


def test_where_one_layer_does_not_hold_nothing_is_run(monkeypatch):
    monkeypatch.setattr(sandbox, "find_tools", lambda: programs.Tools("/usr/bin/bwrap", False))
    monkeypatch.setattr(
        sandbox, "probe", lambda tools: [sandbox.Layer("seccomp", False, "mode 0"), sandbox.Layer("x", True, "")]
    )
    sandbox.require_host.cache_clear()
    with pytest.raises(SandboxError, match=r"so none is run; what does not hold: seccomp \(mode 0\)"):
        Sandbox()
    sandbox.require_host.cache_clear()


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_jump_of_the_filter_stays_inside_and_it_ends_with_an_answer(machine):
    program = filter_program(machine)
    steps = [program[start : start + 8] for start in range(0, len(program), 8)]
    jumps = [(place, step[2], step[3]) for place, step in enumerate(steps) if step[0] in (0x15, 0x35, 0x45)]
    assert all(place + 1 + jump < len(steps) for place, *both in jumps for jump in both)
    assert steps[-1][0] == 0x06
    assert len(steps) < 4096
