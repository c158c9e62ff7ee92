"""`atropos status`: how far a run is, from any shell, also after a crash; `atropos runs`: every run below a folder."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table

from atroposlib.cli.boundary import command, run
from atroposlib.errors import ConfigError, LaunchError, PathError
from atroposlib.paths import expand_path
from atroposlib.status.page import write_page
from atroposlib.status.prometheus import serve_metrics
from atroposlib.status.runs import RunStatus, find_runs, read_status
from atroposlib.status.table import duration, print_status, render

HELP = """Show what a run has done: problems, accepted share by task, tokens, failures, restarts, files;
of a training run its steps.

PATH is the folder of a datagen or training run; of an environment that runs on its own its rollout file, its progress
file or their folder; of an evaluation the folder of its results.

Examples:
  atropos status runs/quickstart
  atropos status runs/quickstart --watch
  atropos status runs/quickstart --json | jq .groups_done
  atropos status data/addition.jsonl
  atropos status runs/quickstart --metrics 9400    # for Prometheus; docs/grafana.json is a dashboard
  xdg-open runs/quickstart/status.html    # the same with plots; a run keeps it up to date
"""
RUNS_HELP = """List the runs below a folder: datagen, training, environments on their own, evaluations.

Examples:
  atropos runs
  atropos runs ~/atropos/data --running
  atropos runs --json | jq '.[] | select(.state == "killed") | .run_dir'
"""


def status(
    path: Annotated[str, typer.Argument(help="The run's folder, or a file of it.")],
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Write the run's status.html again and print its path.")] = False,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve metrics of all its processes for Prometheus, until Ctrl-C."),
    ] = None,
) -> None:
    folder = expand_path(path, what="PATH")
    if not folder.exists():
        raise PathError(f"{folder} does not exist; `atropos runs FOLDER` lists the runs below a folder")
    current = read_status(folder)
    if as_json:
        print(json.dumps(current.as_json(), indent=1))
        return
    if metrics is not None:
        _serve_metrics(folder, metrics)
        return
    if html:
        print(write_page(current))
        return
    if watch:
        with Live(console=Console(), auto_refresh=False) as live:
            while current.running:
                live.update(render(current), refresh=True)
                time.sleep(2)
                current = read_status(folder)
    print_status(current, Console())


def _serve_metrics(folder: Path, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"--metrics is {address!r}; expected a port such as 9400, or 0.0.0.0:9400")
    try:
        server = serve_metrics(folder, host or "127.0.0.1", int(port))
    except (OSError, OverflowError) as error:
        raise LaunchError(f"--metrics {address} cannot be listened on ({error}); choose another port") from error
    print(f"metrics of {folder}: http://{host or '127.0.0.1'}:{server.server_port}/metrics", flush=True)
    threading.Event().wait()


app = command(status, HELP)


def main() -> None:
    run(app, "atropos status")


def runs(
    folder: Annotated[str, typer.Argument(help="Where to look, four folders deep.")] = ".",
    running: Annotated[bool, typer.Option("--running", help="Only those that run now.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array, everything that is known.")] = False,
) -> None:
    root = expand_path(folder, what="FOLDER")
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder; give the one that holds your runs, such as runs or ~/atropos/data")
    found = [run for run in find_runs(root) if run.running or not running]
    if as_json:
        print(json.dumps([run.as_json() for run in found], indent=1))
        return
    if not found:
        print(f"no runs below {root}" + (" that run now" if running else ""))
        return
    table = Table("run", "kind", "state", "done", "accepted", "size", "last sign", box=None)
    for each in sorted(found, key=lambda run: -run.updated_at):
        accepted = f"{each.accepted_share:.0%}" if each.responses else "-"
        since = f"{duration(max(0.0, time.time() - each.updated_at))} ago" if each.updated_at else "-"
        table.add_row(_name(each, root), each.kind, each.state, _done(each), accepted, _size(each), since)
    console = Console()
    if not console.is_terminal:
        console.width = 240
    console.print(table)


def _name(status: RunStatus, root: Path) -> str:
    """The path to give to `atropos status`."""
    path = Path(status.outputs["progress"][0] if "progress" in status.outputs else status.run_dir)
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) or not root.is_absolute() else str(path)


def _done(status: RunStatus) -> str:
    if status.training:
        return f"{status.training.step}/{status.training.of} steps"
    if status.results:
        return f"{len(status.results)} metrics"
    if status.kind == "evaluate":
        return f"{status.groups_done}/{status.problems} items" if status.problems else f"{status.responses} answers"
    return f"{status.groups_done}/{status.problems}" if status.problems else f"{status.groups_done} groups"


def _size(status: RunStatus) -> str:
    """Bytes of a run's folder, or of the files of one that stands alone."""
    if status.kind in ("datagen", "train"):
        files = [Path(folder) / name for folder, _, names in os.walk(status.run_dir) for name in names]
    else:
        files = [Path(path) for paths in status.outputs.values() for path in paths]
    return decimal(sum(path.stat().st_size for path in files if path.is_file())).replace("bytes", "B")


runs_app = command(runs, RUNS_HELP)


def runs_main() -> None:
    run(runs_app, "atropos runs")


if __name__ == "__main__":
    main()
