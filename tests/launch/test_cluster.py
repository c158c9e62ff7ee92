"""`atropos cluster` against a fake ssh that runs commands here, and against a real sshd on loopback if there is one."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atroposlib.cli.cluster import Cluster, Shell, main, remote_path

FAKE_SSH = """#!/bin/bash
# ssh [-o X]... HOST COMMAND: runs COMMAND here, in another home; loses the connection as often as `lose` has lines
while [ "$1" = -o ]; do shift 2; done
echo "$1" >>"$FAKE/hosts"; shift
if [ -s "$FAKE/lose" ]; then
    sed -i 1d "$FAKE/lose"
    echo "connection reset" >&2
    exit 255
fi
HOME=$FAKE/home exec bash -c "$*"
"""
FAKE_SBATCH = """#!/bin/bash
echo "$PWD: $*" >>"$FAKE/sbatch"
echo "$((100 + $(wc -l <"$FAKE/sbatch")));cluster"
"""
FAKE_SQUEUE = """#!/bin/bash
echo "101 debug intern-bootcamp RUNNING"
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """The folder of a fake cluster: `home` is the home over there."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("ssh", FAKE_SSH), ("sbatch", FAKE_SBATCH), ("squeue", FAKE_SQUEUE)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "home" / "atropos-repo").mkdir(parents=True)
    (tmp_path / "home" / ".profile").write_text(f"export PATH={tools}:$PATH\n")
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


@pytest.fixture
def atropos(monkeypatch, capfd):
    """Run `atropos cluster` in this process; what it started printed is told, too."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["atropos cluster", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, *capfd.readouterr())

    return call


needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


@needs_rsync
def test_submit_sends_the_code_and_queues_one_job_behind_the_other(cluster, atropos):
    (cluster / "here" / "code.py").write_text("x")
    (cluster / "here" / ".git").mkdir()
    (cluster / "here" / ".git" / "big").write_text("x")
    done = atropos(
        "submit", "login", "a.slurm", "--set", "x=1 2", "--sbatch", "--array=0-3", "--then", "b.slurm r.yaml"
    )
    assert (done.returncode, done.stdout) == (0, "101\n102\n"), done.stderr
    there = cluster / "home" / "atropos-repo"
    assert [path.name for path in there.iterdir()] == ["code.py"]
    assert (cluster / "sbatch").read_text().splitlines() == [
        f"{there}: --parsable --output=%x-%A_%a.out --array=0-3 a.slurm --set x=1 2",
        f"{there}: --parsable --dependency=afterok:101 b.slurm r.yaml",
    ]


def test_a_dry_run_prints_commands_that_can_be_pasted_and_runs_none(cluster, atropos):
    done = atropos("submit", "login", "a.slurm", "--then", "b.slurm", "--dry-run")
    assert done.returncode == 0, done.stderr
    push, first, second = (shlex.split(line) for line in done.stdout.splitlines())
    assert (push[0], push[-2:]) == ("rsync", ["./", "login:~/atropos-repo/"])
    assert first[-1] == "bash -lc 'cd ~/atropos-repo && sbatch --parsable a.slurm'"
    assert "--dependency=afterok:JOB_1" in second[-1]
    assert not (cluster / "hosts").exists()


@needs_rsync
def test_sync_continues_after_a_lost_connection_and_again_when_called_again(cluster, atropos):
    run = cluster / "home" / "data" / "r 1"
    (run / "api").mkdir(parents=True)
    (run / "api" / "queue").write_text("theirs")
    (run / "shard.jsonl").write_text("1\n")
    (cluster / "lose").write_text("\n")
    done = atropos("sync", "login", "~/data/r 1", "copy")
    assert done.returncode == 0, done.stderr
    assert "resuming in 2 s" in done.stderr
    (run / "shard.jsonl").write_text("1\n2\n")
    assert atropos("sync", "login", "~/data/r 1", "copy").returncode == 0
    assert (cluster / "here" / "copy" / "shard.jsonl").read_text() == "1\n2\n"
    assert not (cluster / "here" / "copy" / "api").exists()


@needs_rsync
def test_sync_leaves_what_a_running_run_is_just_writing(cluster, atropos):
    run = cluster / "home" / "run"
    run.mkdir()
    for name in (".run.json.x1", ".progress.json.x1", ".status.html.x1", ".history.json.x1", ".sft.jsonl.7.part"):
        (run / name).touch()
    for name in ("run.json", ".r_0001.jsonl.idx"):
        (run / name).touch()
    assert atropos("sync", "login", "~/run", "copy").returncode == 0
    assert {path.name for path in (cluster / "here" / "copy").iterdir()} == {"run.json", ".r_0001.jsonl.idx"}


@pytest.mark.parametrize(("code", "expected"), [(24, 0), (23, 1)])
def test_files_that_vanish_while_rsync_looks_are_no_failure(cluster, atropos, code, expected):
    rsync = cluster / "bin" / "rsync"
    rsync.write_text(f"#!/bin/bash\nexit {code}\n")
    rsync.chmod(0o755)
    assert atropos("sync", "login", "~/run", "copy").returncode == expected


def test_logs_shows_the_jobs_output_and_its_services(cluster, atropos):
    logs = cluster / "home" / "atropos-repo" / "logs" / "101"
    logs.mkdir(parents=True)
    (logs / "api.log").write_text("old\nlast of the api\n")
    (logs.parents[1] / "intern-bootcamp-101.out").write_text("progress\n")
    done = atropos("logs", "login", "101", "--lines", "1")
    assert done.returncode == 0, done.stderr
    assert "last of the api" in done.stdout
    assert "progress" in done.stdout
    assert "old" not in done.stdout


FAKE_ARRAY = """#!/bin/bash
# writes where task 2 of array 101 would: --output with %x, %A, %a and %j, the task's own number, filled in
output=%x-%j.out # as the scripts have it
for word; do [[ $word == --output=* ]] && output=${word#--output=}; done
output=${output//%x/intern-bootcamp}; output=${output//%A/101}; output=${output//%a/2}
echo "task 2 at work" >"${output//%j/103}"
echo 101
"""


def test_logs_finds_the_output_of_an_array_task_that_submit_queued(cluster, atropos):
    (cluster / "bin" / "sbatch").write_text(FAKE_ARRAY)
    (cluster / "home" / "atropos-repo" / "logs" / "101_2").mkdir(parents=True)
    (cluster / "home" / "atropos-repo" / "logs" / "101_2" / "api.log").touch()
    assert atropos("submit", "login", "a.slurm", "--sbatch", "--array=0-3", "--no-push").returncode == 0
    done = atropos("logs", "login", "101_2")
    assert done.returncode == 0, done.stderr
    assert "task 2 at work" in done.stdout


def test_status_shows_the_queue_and_what_fails_over_there_is_said(cluster, atropos):
    (cluster / "home" / "atropos-repo" / ".venv").symlink_to(sys.prefix)
    (cluster / "home" / "no-run").mkdir()
    done = atropos("status", "login", "~/no-run")
    assert "intern-bootcamp RUNNING" in done.stdout
    assert done.returncode == 1
    assert "ssh ended with exit code 1" in done.stderr
    assert "holds no run" in done.stderr


@pytest.mark.parametrize(
    "command", [["status", "wronghost"], pytest.param(["sync", "h", "~/r", "c"], marks=needs_rsync)]
)
def test_a_host_that_cannot_be_reached_is_said_at_once(cluster, atropos, command):
    ssh = cluster / "bin" / "ssh"
    ssh.write_text(
        '#!/bin/bash\necho >>"$FAKE/tries"; echo "ssh: Could not resolve hostname wronghost" >&2; exit 255\n'
    )
    done = atropos(*command)
    assert done.returncode == 1
    assert (cluster / "tries").read_text() == "\n"
    assert "no connection (ssh: Could not resolve hostname wronghost)" in done.stderr
    assert "connection lost" not in done.stderr


def test_names_are_quoted_for_the_shell_over_there_except_for_the_home():
    assert remote_path("~/a b") == "~/'a b'"
    login_shell = shlex.split(Cluster("h", "~/x").logs("7; rm", lines=2, follow=True)[-1])
    assert shlex.split(login_shell[2])[-2:] == ["./*-7; rm.out", "logs/7; rm/*.log"]


@pytest.fixture
def sshd(tmp_path, monkeypatch) -> Iterator[str]:
    """A real sshd on loopback; the name that ssh knows it by."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or shutil.which("rsync") is None or os.geteuid() != 0:
        pytest.skip("needs sshd, rsync and root")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = [
        f"ListenAddress=127.0.0.1:{port}",
        f"HostKey={tmp_path}/host",
        f"AuthorizedKeysFile={tmp_path}/user.pub",
    ]
    settings += ["StrictModes=no", "UsePAM=no", f"PidFile={tmp_path}/pid", "PermitRootLogin=prohibit-password"]
    command = [program, "-D", "-e", "-f", "/dev/null", *(word for each in settings for word in ("-o", each))]
    with (tmp_path / "sshd.log").open("w") as log:
        server = subprocess.Popen(command, stderr=log)
    config = f"Host login\nHostName 127.0.0.1\nPort {port}\nIdentityFile {tmp_path}/user\nBatchMode yes\n"
    config += "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    (tmp_path / "config").write_text(config)
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/bash\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    deadline = time.monotonic() + 30
    while subprocess.run(["ssh", "login", "true"], capture_output=True).returncode:
        assert time.monotonic() < deadline, (tmp_path / "sshd.log").read_text()
        time.sleep(0.1)
    yield "login"
    server.terminate()
    server.wait(60)


def test_code_and_data_travel_over_a_real_sshd(sshd, tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    (here / "code.py").write_text("x")
    monkeypatch.chdir(here)
    Shell(dry_run=False).show(Cluster(sshd, str(there)).push("."))
    assert (there / "code.py").read_text() == "x"
    run = there / "run"
    run.mkdir()
    (run / "shard.jsonl").write_text("1\n" * 1000)
    assert atropos("sync", sshd, str(run), "copy").returncode == 0
    assert (here / "copy" / "shard.jsonl").read_bytes() == (run / "shard.jsonl").read_bytes()
    (there / "logs" / "7").mkdir(parents=True)
    (there / "logs" / "7" / "api.log").write_text("up\n")
    (there / "x-7.out").write_text("progress\n")
    assert "progress" in atropos("logs", sshd, "7", "--folder", str(there)).stdout


def test_a_quote_that_does_not_end_is_refused_before_anything_is_queued(atropos, cluster):
    done = atropos("submit", "login", "a.slurm", "--no-push", "--then", "b.slurm 'x")
    assert done.returncode == 2
    assert '--then is "b.slurm \'x": No closing quotation' in done.stderr
    assert not (cluster / "sbatch").exists()
