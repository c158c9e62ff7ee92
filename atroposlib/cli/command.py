"""What the dataset commands share: exit codes, log lines and progress on stderr."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from atroposlib.data.rollout_files import find_rollout_files
from atroposlib.errors import AtroposError

_UPDATE_BYTES = 8_000_000


def run(app: typer.Typer, name: str) -> None:
    """Run a typer app. Exit 0 done, 1 failed with a sentence, 2 wrong usage, 130 on Ctrl-C."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        app(prog_name=name)
    except AtroposError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"{name}: stopped; nothing half-written is left", file=sys.stderr)
        sys.exit(130)


@contextmanager
def reading(paths: Iterable[str], *, passes: int = 1) -> Iterator[Callable[[int], None]]:
    """A function to be told the bytes read of `paths`; draws a bar on a terminal's stderr, nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    total = passes * sum(path.stat().st_size for path in find_rollout_files(paths))
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading", total=total)
        pending = 0

        def advance(count: int) -> None:
            nonlocal pending
            pending += count
            if pending >= _UPDATE_BYTES:
                progress.advance(task, pending)
                pending = 0

        yield advance
