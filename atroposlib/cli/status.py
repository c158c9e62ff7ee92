"""`atropos status`: how far a run is, from any shell, also after a crash."""

import json
import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from atroposlib.cli.boundary import command, run
from atroposlib.errors import ConfigError
from atroposlib.paths import expand_path
from atroposlib.status.page import write_page
from atroposlib.status.prometheus import serve_metrics
from atroposlib.status.runs import read_status
from atroposlib.status.table import print_status, render

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
        raise ConfigError(f"--metrics {address} cannot be listened on ({error}); choose another port") from error
    print(f"metrics of {folder}: http://{host or '127.0.0.1'}:{server.server_port}/metrics", flush=True)
    threading.Event().wait()


app = command(status, HELP)


def main() -> None:
    run(app, "atropos status")


if __name__ == "__main__":
    main()
