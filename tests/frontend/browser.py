"""A headless Chromium and a served view for the tests that look at pages as a person would."""

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from atroposlib.frontend.run_view import FileRollouts, make_app

CHROMIUM = os.environ.get("ATROPOS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser; closed at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextlib.contextmanager
def served(*paths: Path) -> Iterator[tuple[str, FileRollouts]]:
    """The address of a view of rollout files, and its source."""
    rollouts = FileRollouts()
    rollouts.follow(list(paths))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(make_app(rollouts), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", rollouts
        server.should_exit = True
        thread.join(10)
