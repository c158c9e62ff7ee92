"""`atropos datagen`: a supervised run from problems to datasets; `atropos quickstart`: the smallest whole one."""

import logging
import os
import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from atroposlib import calm_log
from atroposlib.cli.boundary import called_as, command, run
from atroposlib.errors import ConfigError
from atroposlib.launch.config import load_config
from atroposlib.launch.datagen import EXIT_WORK_REMAINS, Stopped, run_datagen
from atroposlib.launch.preflight import not_checked, preflight
from atroposlib.lock_files import keep_earlier
from atroposlib.paths import expand_path
from atroposlib.status.table import Display, print_status

HELP = """Run engine, trajectory API, environment and trainer as one supervised job, then export the dataset.

The same command continues after a crash, a kill or Ctrl-C, and says so when there is nothing left to do.

Examples:
  atropos datagen configs/quickstart.yaml
  atropos datagen configs/quickstart.yaml --check
  atropos datagen configs/quickstart.yaml --run-dir runs/second --problems 8
  atropos datagen configs/intern_bootcamp_r1.yaml --set engine.tp=2 --set engine.dp=4

Exit codes: 0 done, 1 failed with a sentence, 2 wrong settings, 75 stopped by a signal with work left.
"""
QUICKSTART_HELP = """Roll out 48 problems with a small model on the CPU, score every answer, and write the right
ones as a dataset.

Everything goes to runs/quickstart in the current folder; the same command continues after a stop. Needs
pip install 'atroposlib[local]'. It is `atropos datagen` with the settings of atroposlib/configs/quickstart.yaml.

Examples:
  atropos quickstart
  atropos quickstart --problems 8 --run-dir /tmp/first
"""


def datagen(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
    check: Annotated[bool, typer.Option("--check", help="Only find what would go wrong; start nothing.")] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Start from scratch; an earlier run is kept, renamed. A requeued SLURM job resumes."
        ),
    ] = False,
    problems: Annotated[int | None, typer.Option(min=1, help="Instead of `problems` in the file.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Instead of `run_dir` in the file.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting, e.g. engine.tp=4; repeatable.", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    settings = load_config(expand_path(config, what="CONFIG"), changes or (), problems=problems, run_dir=run_dir)
    if check:
        model = preflight(settings, starts=False, say=print)
        print(f"{config}: nothing found that would stop it; model {model.name}, run_dir {settings.run_dir}")
        for thing in not_checked(settings, model):
            print(f"not checked: {thing}")
        return
    if fresh and settings.share.member:
        raise ConfigError(
            "--fresh with share.member would take the folder from the other members; choose another run_dir"
        )
    if fresh and int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        print("--fresh was for the first start of this job, which has been queued again; continuing", file=sys.stderr)
    elif fresh and (kept := keep_earlier(Path(settings.run_dir))):
        print(f"earlier run kept as {kept}", file=sys.stderr)
    with Display() as display:
        calm_log.begin(logging.INFO, handler=display.log_handler())
        logging.getLogger("gguf").setLevel(logging.WARNING)  # it tells of every file it writes
        try:
            status = run_datagen(settings, display)
        except Stopped as stopped:
            print(f"{called_as('atropos datagen')}: {stopped}", file=sys.stderr)
            raise typer.Exit(EXIT_WORK_REMAINS) from None
    print_status(status, Console())
    print(f"look at them   atropos view-run {shlex.quote(status.run_dir)}")


app = command(datagen, HELP)


def main() -> None:
    run(app, "atropos datagen", log_level=None)


def quickstart(
    check: Annotated[bool, typer.Option("--check", help="Only find what would go wrong; start nothing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start from scratch; an earlier run is kept.")] = False,
    problems: Annotated[int | None, typer.Option(min=1, help="Groups to record. Default: 48.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Default: runs/quickstart.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting, e.g. responses=4; repeatable.", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    config = Path(str(files("atroposlib"))) / "configs" / "quickstart.yaml"
    datagen(config, check=check, fresh=fresh, problems=problems, run_dir=run_dir, changes=changes)


quickstart_app = command(quickstart, QUICKSTART_HELP)


def quickstart_main() -> None:
    run(quickstart_app, "atropos quickstart", log_level=None)


if __name__ == "__main__":
    main()
