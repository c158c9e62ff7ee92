"""Products of a finished rollout file: its HTML twin, and a compressed copy in its place when asked for.

Both are made in a thread that the end of the process does not wait for. Neither can lose anything: the twin is derived,
and a shard is removed only after its compressed copy is complete and synced.
"""

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from atroposlib.data.compressed import zstd
from atroposlib.rollouts.failures import describe_error

logger = logging.getLogger(__name__)


class Reports:
    """Makes the twins of one run."""

    def __init__(self, write_html: Callable[[str, str], None], *, compress: bool) -> None:
        """`write_html(input, output)` renders one rollout file."""
        self._write_html = write_html
        self._compress = compress
        self._running: set[asyncio.Task[None]] = set()

    def add(self, path: Path) -> None:
        """A shard is complete: report on it in the background."""
        task = asyncio.create_task(self._report(path, is_complete=True))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def finish(self, paths: Iterable[Path]) -> None:
        """Wait for reports in progress, then make those that are missing or older than their rollouts."""
        await asyncio.gather(*self._running)
        for path in paths:
            twin = html_twin(path)
            if path.exists() and (not twin.exists() or twin.stat().st_mtime_ns < path.stat().st_mtime_ns):
                await self._report(path, is_complete=False)

    async def _report(self, path: Path, *, is_complete: bool) -> None:
        twin = html_twin(path)
        try:
            for stale in twin.parent.glob(f".{twin.name}.*"):
                stale.unlink()  # of a process that was stopped while it made the page
            await _in_thread(lambda: self._write_html(str(path), str(twin)))
            if is_complete and self._compress:
                await _in_thread(lambda: compress(path))
        except Exception as error:
            logger.error("report not written: file=%s error=%s", path, describe_error(error))


async def _in_thread(call: Callable[[], object]) -> None:
    """As `asyncio.to_thread`, but a stopping process leaves the thread behind: a report may take minutes."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def end(error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(None)

    def work() -> None:
        problem: BaseException | None = None
        try:
            call()
        except BaseException as error:
            problem = error  # raised where the report is awaited
        try:
            loop.call_soon_threadsafe(end, problem)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    threading.Thread(target=work, name="report", daemon=True).start()
    await done


def html_twin(path: Path) -> Path:
    """Where the report on a rollout file lies.

    >>> html_twin(Path("a/toy_rollouts_main_0001.jsonl.zst")).name
    'toy_rollouts_main_0001.html'
    """
    plain = path.with_suffix("") if path.suffix == ".zst" else path
    return plain.with_suffix(".html")


def compress(path: Path) -> Path:
    """Replace `path` by `<path>.zst`; the new file's path. Interrupted at any point, one of the two is complete."""
    target = path.with_name(path.name + ".zst")
    temporary = path.with_name(f".{path.name}.zst.new")
    with path.open("rb") as plain, temporary.open("wb") as packed:
        with zstd.ZstdFile(packed, "wb") as stream:
            shutil.copyfileobj(plain, stream, 1 << 20)
        packed.flush()
        os.fsync(packed.fileno())
    modified = path.stat().st_mtime_ns
    os.utime(temporary, ns=(modified, modified))
    os.replace(temporary, target)
    path.unlink()
    return target
