"""`atropos cluster`: the same jobs on a SLURM cluster that is reached over ssh.

`Cluster` only makes command lines, `Shell` runs them. Remote paths may begin with `~/`.
"""

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Annotated

import typer

from atroposlib.backoff import backoff_s
from atroposlib.cli.boundary import App, run
from atroposlib.errors import ConfigError, LaunchError
from atroposlib.paths import expand_path

HELP = """Send this repository to a cluster, queue jobs there, watch them and bring their data back.

HOST is whatever ssh takes: user@login.cluster, or a name in ~/.ssh/config. --dry-run prints every command.

Examples:
  atropos cluster submit login slurm/intern_bootcamp_datagen.slurm
  atropos cluster submit login slurm/intern_bootcamp_datagen.slurm --sbatch --array=0-3 --then
  "slurm/train.slurm configs/trainer/grpo.yaml --run-dir r1"
  atropos cluster status login '~/atropos/data/intern_bootcamp_r1'
  atropos cluster sync login '~/atropos/data/intern_bootcamp_r1' runs/r1
  atropos cluster logs login 4711 --follow
"""

app = App(HELP)

Host = Annotated[str, typer.Argument(help="Login node, as ssh takes it.", metavar="HOST")]
Folder = Annotated[str, typer.Option("--folder", help="The repository's folder on the cluster.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print every command, run none.")]
FOLDER = "~/atropos-repo"


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
def submit(
    host: Host,
    script: Annotated[list[str], typer.Argument(help="A script of slurm/ and its arguments.", metavar="SCRIPT [ARGS]")],
    folder: Folder = FOLDER,
    sbatch: Annotated[list[str] | None, typer.Option(help="An option for sbatch, e.g. --array=0-3.")] = None,
    after: Annotated[str | None, typer.Option(help="Start when this job has succeeded.")] = None,
    then: Annotated[list[str] | None, typer.Option(help="Script and arguments to queue behind it.")] = None,
    push: Annotated[bool, typer.Option(help="Send the current folder first.")] = True,
    dry_run: DryRun = False,
) -> None:
    """Send the code, then queue SCRIPT and whatever is to follow it; prints the jobs' numbers.

    Examples:
      atropos cluster submit login slurm/intern_bootcamp_datagen.slurm --set environment.env.seed=7
      atropos cluster submit login slurm/intern_bootcamp_datagen.slurm --sbatch --array=0-3 --sbatch --time=12:00:00
      atropos cluster submit login slurm/train.slurm configs/trainer/grpo.yaml --run-dir grpo --after 4711
    """
    try:
        scripts = [shlex.split(following) for following in then or ()]
    except ValueError as error:
        raise ConfigError(f"--then is {' '.join(then or ())!r}: {error}; give a script with its arguments") from None
    cluster, shell = Cluster(host, folder), Shell(dry_run=dry_run)
    if push:
        shell.show(cluster.push("."))
    job = shell.answer(cluster.submit(script, sbatch or (), after), unknown="JOB_1")
    jobs = [job]
    for number, following in enumerate(scripts, start=2):
        jobs.append(shell.answer(cluster.submit(following, (), jobs[-1]), unknown=f"JOB_{number}"))
    if not dry_run:
        print("\n".join(jobs))


@app.command()
def status(
    host: Host,
    run_dir: Annotated[str | None, typer.Argument(help="A run's folder there; also shows how far it is.")] = None,
    folder: Folder = FOLDER,
    dry_run: DryRun = False,
) -> None:
    """Show our jobs in the queue, and how far a run is.

    Examples:
      atropos cluster status login
      atropos cluster status login '~/atropos/data/intern_bootcamp_r1'
    """
    cluster, shell = Cluster(host, folder), Shell(dry_run=dry_run)
    shell.show(cluster.queue())
    if run_dir:
        shell.show(cluster.run_status(run_dir))


@app.command()
def sync(
    host: Host,
    run_dir: Annotated[str, typer.Argument(help="A run's folder there.")],
    target: Annotated[str, typer.Argument(help="Folder here; the same one resumes with what is there.")],
    dry_run: DryRun = False,
) -> None:
    """Bring a run's files here, running or not; a lost connection is resumed.

    Example, to be called again and again:
      atropos cluster sync login '~/atropos/data/intern_bootcamp_r1' runs/r1
    """
    here = expand_path(target, what="TARGET")
    if not dry_run:
        here.mkdir(parents=True, exist_ok=True)
    Shell(dry_run=dry_run).show(Cluster(host, FOLDER).pull(run_dir, str(here)))


@app.command()
def logs(
    host: Host,
    job: Annotated[str, typer.Argument(help="The job's number; of an array task ARRAY_TASK.")],
    folder: Folder = FOLDER,
    lines: Annotated[int, typer.Option(min=1, help="Last lines of each log.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new lines.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Show the end of a job's output and of its services' logs.

    Examples:
      atropos cluster logs login 4711 --follow
      atropos cluster logs login 4711_2 --lines 200
    """
    Shell(dry_run=dry_run).show(Cluster(host, folder).logs(job, lines=lines, follow=follow))


SSH = ["ssh", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
RSYNC = ["rsync", "--archive", "--compress", "--partial", "--timeout=120", "--rsh", shlex.join(SSH)]
LOST_CONNECTION = {10, 12, 30, 35, 255}
"""Exit codes of rsync and ssh after which the same command may succeed."""
ARRAY_OUTPUT = "--output=%x-%A_%a.out"
"""Names a task's output after the array; the scripts' own `%j` is a number of the task's own, which nobody is told."""
_NEVER_CONNECTED = ("ssh: ", "Permission denied (", "Host key verification failed")
"""Start of the line in which ssh says why it did not get in; once it was in, the same may pass as without network."""
TRIES = 6
VANISHED = 24
"""Exit code of rsync when files went away meanwhile, as those that a run replaces do; all others have come."""
_TEMPORARIES = [".run.json.*", ".progress.json.*", ".status.html.*", ".history.json.*", ".*.part"]
_NOT_CODE = [".git", ".venv", "__pycache__", "runs", "logs"]


@dataclass(frozen=True)
class Cluster:
    """A login node, and the folder there that holds this repository."""

    host: str
    folder: str

    def push(self, source: str) -> list[str]:
        """Send the repository; files that git ignores stay here, nothing is deleted there."""
        excludes = [f"--exclude={name}" for name in _NOT_CODE]
        return [*RSYNC, "--filter=:- .gitignore", *excludes, f"{source.rstrip('/')}/", f"{self.host}:{self.folder}/"]

    def submit(self, script: Sequence[str], options: Sequence[str], after: str | None) -> list[str]:
        """Queue a script with its arguments; prints the job's number."""
        waits = [f"--dependency=afterok:{after}"] if after else []
        is_array = any(option.startswith(("--array", "-a")) for option in options)
        output = [ARRAY_OUTPUT] if is_array else []  # first, as the last one given wins
        return self._in_folder(shlex.join(["sbatch", "--parsable", *output, *options, *waits, *script]))

    def queue(self) -> list[str]:
        """Our jobs in the queue."""
        return self._in_folder("squeue --me --format='%.18i %.9P %.30j %.8T %.12M %.12l %.6D %R'")

    def run_status(self, run_dir: str) -> list[str]:
        """`atropos status` of a run there."""
        return self._in_folder(f'PATH="$PWD/.venv/bin:$PATH" atropos status {remote_path(run_dir)}')

    def pull(self, run_dir: str, target: str) -> list[str]:
        """Bring a run folder here; resumes where an earlier try was cut off. The queue's state stays there."""
        there, here = f"{self.host}:{run_dir.rstrip('/')}/", f"{target.rstrip('/')}/"
        excludes = [f"--exclude={name}" for name in ("api/", ".lock", *_TEMPORARIES)]
        return [*RSYNC, *excludes, there, here]

    def logs(self, job: str, *, lines: int, follow: bool) -> list[str]:
        """The end of a job's output and of its services' logs."""
        how = f"tail -n {lines}{' -F' if follow else ''}"
        return self._in_folder(f"{how} ./*-{shlex.quote(job)}.out logs/{shlex.quote(job)}/*.log")

    def _in_folder(self, command: str) -> list[str]:
        """In a login shell: many clusters only put SLURM in the PATH there."""
        return [*SSH, self.host, f"bash -lc {shlex.quote(f'cd {remote_path(self.folder)} && {command}')}"]


class Shell:
    """Runs commands, or with `dry_run` only prints them, one a line, ready to be pasted."""

    def __init__(self, *, dry_run: bool) -> None:
        self._dry_run = dry_run

    def show(self, command: Sequence[str]) -> None:
        """Run a command whose output is for the user; a lost connection is tried again.

        LaunchError: it failed for good.
        """
        self._run(command, capture=False)

    def answer(self, command: Sequence[str], unknown: str) -> str:
        """The last line that a command prints; `unknown` in a dry run. It is not tried again, as it may have worked.

        LaunchError: it failed.
        """
        output = self._run(command, capture=True, tries=1)
        return output.split()[-1].partition(";")[0] if output.split() else unknown

    def _run(self, command: Sequence[str], *, capture: bool, tries: int = TRIES) -> str:
        if self._dry_run:
            print(shlex.join(command))
            return ""
        waits_s = [backoff_s(number, first_s=2.0) for number in range(1, tries)]
        done, refusal = _run_once(command, capture)
        if refusal and done.returncode in LOST_CONNECTION:
            raise LaunchError(f"no connection ({refusal}); see whether plain ssh to this host works")
        for wait_s in waits_s:
            if done.returncode not in LOST_CONNECTION:
                break
            print(f"connection lost; resuming in {wait_s:.0f} s", file=sys.stderr)
            time.sleep(wait_s)
            done, _ = _run_once(command, capture)
        if done.returncode and (command[0], done.returncode) != ("rsync", VANISHED):
            raise LaunchError(f"{command[0]} ended with exit code {done.returncode}: {shlex.join(command)}")
        return done.stdout or ""


def _run_once(command: Sequence[str], capture: bool) -> "tuple[subprocess.CompletedProcess[str], str]":
    """Run it, its errors shown as they come; how it ended, and why ssh did not get in ("": it did, or `capture`)."""
    refusals: list[str] = []

    def pass_on(errors: IO[str]) -> None:
        with errors:
            for line in errors:
                print(line, end="", file=sys.stderr, flush=True)
                if line.startswith(_NEVER_CONNECTED):
                    refusals.append(line.strip())

    try:
        if capture:
            return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False), ""
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
    except FileNotFoundError as error:
        raise LaunchError(f"the program {command[0]} is not installed here; install it") from error
    reader = threading.Thread(target=pass_on, args=[process.stderr], daemon=True)
    reader.start()
    code = process.wait()
    reader.join(timeout=1)  # no longer: a shared connection (ControlPersist) may live on and hold the stream open
    return subprocess.CompletedProcess(command, code), "".join(refusals[-1:])


def remote_path(path: str) -> str:
    """Quoted for the shell over there, which still expands a leading `~/`.

    >>> remote_path("~/my runs/r1")
    "~/'my runs/r1'"
    """
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") and len(path) > 2 else shlex.quote(path)


def main() -> None:
    run(app, "atropos cluster")


if __name__ == "__main__":
    main()
