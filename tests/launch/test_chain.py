"""`slurm/chain.sh` without SLURM: which exit code a job has when its command ends at the moment of a signal."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CHAIN = Path(__file__).parents[2] / "slurm" / "chain.sh"
COMMAND = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # one that comes before it is waited for is not lost
print("ready", flush=True)
signal.sigwait([signal.SIGUSR1])
os._exit(int(sys.argv[1]))
"""
JOB = f"""
source {CHAIN}
scontrol() {{ echo "$1"; }}
kill() {{ # the command is gone before anybody looks
    builtin kill "$@" || return
    [ "$1" = -0 ] || while builtin kill -0 "$run" 2>/dev/null; do :; done
}}
run_chained "$@"
"""


@pytest.mark.parametrize("code", [0, 75])
def test_a_command_that_ends_at_once_keeps_its_exit_code(code):
    command = ["bash", "-c", JOB, "job", sys.executable, "-c", COMMAND, str(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"
            job.send_signal(signal.SIGUSR1)
            assert job.wait(timeout=60) == code
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize("settings", ["dev", "production"])
def test_the_causal_jobs_wait_for_each_other(tmp_path, settings):
    """Printed, not queued; `make test-slurm` has a cluster."""
    repository = CHAIN.parents[1]
    command = ["bash", str(repository / "slurm" / "causal.sh"), f"configs/causal/{settings}.env"]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DRY_RUN": "1"}
    done = subprocess.run(command, cwd=repository, env=environ, capture_output=True, text=True, timeout=60, check=True)
    jobs = done.stdout.splitlines()
    assert [job.partition("afterok:")[2].partition(" ")[0] for job in jobs] == [
        "",
        "<collect>",
        "<dataset>",
        "<surrogate>",
    ]
    assert [job.split(".slurm ")[1].split(" ")[0] for job in jobs[:3]] == ["collect", "dataset", "surrogate"]
    assert (repository / jobs[3].split(".slurm ")[1].split(" ")[0]).is_file()
