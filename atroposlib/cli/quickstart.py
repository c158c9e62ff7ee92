"""`atropos quickstart`: the smallest whole datagen run, from the settings that come with the package."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from atroposlib.cli import datagen
from atroposlib.cli.boundary import command, run

HELP = """Roll out 48 problems with a small model on the CPU, score every answer, and write the right ones as a dataset.

Everything goes to runs/quickstart in the current folder; the same command continues after a stop. Needs
pip install 'atroposlib[local]'. It is `atropos datagen` with the settings of atroposlib/configs/quickstart.yaml.

Examples:

  atropos quickstart

  atropos quickstart --problems 8 --run-dir /tmp/first
"""


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
    datagen.datagen(config, check=check, fresh=fresh, problems=problems, run_dir=run_dir, changes=changes)


app = command(quickstart, HELP)


def main() -> None:
    run(app, "atropos quickstart", log_level=None)


if __name__ == "__main__":
    main()
