"""`atropos cluster`: the same jobs on a SLURM cluster that is reached over ssh."""

import shlex
from typing import Annotated

import typer

from atroposlib.cli.boundary import App, run
from atroposlib.launch.cluster import Cluster, Shell
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
    cluster, shell = Cluster(host, folder), Shell(dry_run=dry_run)
    if push:
        shell.show(cluster.push("."))
    job = shell.answer(cluster.submit(script, sbatch or (), after), unknown="JOB_1")
    jobs = [job]
    for number, following in enumerate(then or (), start=2):
        jobs.append(shell.answer(cluster.submit(shlex.split(following), (), jobs[-1]), unknown=f"JOB_{number}"))
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


def main() -> None:
    run(app, "atropos cluster")


if __name__ == "__main__":
    main()
