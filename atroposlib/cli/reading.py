"""A bar for long reading of rollout files, on stderr."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from atroposlib.data.rollout_files import find_rollout_files

_UPDATE_BYTES = 8_000_000


@contextmanager
def reading(paths: Iterable[str], *, passes: int = 1) -> Iterator[Callable[[int], None]]:
    """A function to be told the bytes read of `paths`; draws a bar on a terminal's stderr, nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    total = passes * sum(path.stat().st_size for path in find_rollout_files(paths, warns=False))
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
