"""Times `view-run` on a large rollout file as its user sees it: `python -m benchmarks.bench_view --gigabytes 20`.

Makes the file (groups of 16 responses of 200 to 3,000 tokens, repeated; it needs that much disk and is removed), starts
`view-run` and opens its page in a headless Chromium (the package playwright), without an index and with.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil

from atroposlib.data.table import index_path
from benchmarks.bench_datasets import write_rollouts
from tests.data.small_tokenizer import write_tokenizer
from tests.frontend.browser import chromium

_BLOCK_MB = 100
_RARE = b"a word that the last group alone holds"


def write_large(path: Path, gigabytes: float) -> None:
    """The same groups again and again, behind them one with a word that no other has."""
    write_rollouts(path, _BLOCK_MB)
    block = path.read_bytes()
    last = block[: block.index(b"\n") + 1].replace(b'"q0"', b'"' + _RARE + b'"')
    with path.open("ab") as stream:
        while stream.tell() < gigabytes * 1e9:
            stream.write(block)
        stream.write(last)
    settings = {"env": {"tokenizer_name": str(write_tokenizer(path.parent / "tokenizer"))}}
    path.with_name("view.config.yaml").write_bytes(orjson.dumps(settings))


@contextlib.contextmanager
def view_run(path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A started `view-run`, its address and its process."""
    command = [sys.executable, "-m", "atroposlib.cli.view_run", "--port", "0", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
        finally:
            process.kill()


def ask(address: str, **query: str) -> dict:
    """The list of groups, as the page asks for it."""
    with urllib.request.urlopen(f"{address}/api/groups?{urllib.parse.urlencode(query)}") as reply:
        return orjson.loads(reply.read())


def look(path: Path, title: str) -> None:
    """Open the page, read the first answer, its tokens, the list, and search; print what each took."""
    begun = time.monotonic()
    with view_run(path) as (address, process), chromium() as browser:
        started = time.monotonic() - begun
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        begun = time.monotonic()
        page.goto(address)
        page.wait_for_selector("article .text", timeout=60_000)
        answer = time.monotonic() - begun
        page.keyboard.press("t")
        page.wait_for_selector(".tokens:not(.ids) .tok", timeout=60_000)
        tokens = time.monotonic() - begun - answer
        first = ask(address)["groups_total"]
        while ask(address)["state"]:
            time.sleep(0.2)
        whole = time.monotonic() - begun
        begun = time.monotonic()
        found = ask(address, min_score="1", sort="tokens")
        listed = time.monotonic() - begun
        begun = time.monotonic()
        while (rare := ask(address, text=_RARE.decode()))["unread"]:
            time.sleep(0.2)
        searched = time.monotonic() - begun
        cpu = process.cpu_times()
        print(
            f"{title}: address after {started:.2f} s, first answer {answer:.2f} s after the page was asked for, its "
            f"tokens as text {tokens:.2f} s later, {first:,} groups known then, all {found['groups_total']:,} after "
            f"{whole:.1f} s; a filtered and sorted list {listed:.2f} s; a search through everything {searched:.1f} s "
            f"({rare['matching']} found); {cpu.user + cpu.system:.1f} CPU-s, {process.memory_info().rss / 1e6:.0f} MB",
            flush=True,
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--folder", help="where there is room; default: the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "view_rollouts_main_0001.jsonl"
        write_large(path, options.gigabytes)
        assert not index_path(path).exists()
        look(path, "without an index")
        look(path, "with it")


if __name__ == "__main__":
    main()
