"""Groups, registrations and servers for the tests of the trajectory API."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from atroposlib.api.server import create_app
from tests.children import Child

REGISTRATION = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 8,
    "max_token_len": 512,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 10,
    "starting_step": 0,
    "num_steps": 100,
}
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount")
ENV = {"max_token_length": 512, "desired_name": "sums", "weight": 1.0, "group_size": 4}


def make_group(uid: int, sequences: int = 4, tokens: int = 3, env_id: int | None = 0, **extra: Any) -> dict[str, Any]:
    """A valid group whose first token is `uid`."""
    rows = [[uid, *range(1, tokens)] for _ in range(sequences)]
    logprobs = [[1.0, *[-0.5] * (tokens - 1)] for _ in range(sequences)]
    masks = [[-100, *row[1:]] for row in rows]
    scores = [float(i) for i in range(sequences)]
    return {"tokens": rows, "masks": masks, "scores": scores, "inference_logprobs": logprobs, "env_id": env_id, **extra}


def uids(answer: Any) -> list[int] | None:
    """The uids of a batch answer, in order; None for a null batch."""
    batch = answer["batch"] if isinstance(answer, dict) else answer.json()["batch"]
    return None if batch is None else [group["tokens"][0][0] for group in batch]


def client_of(app: FastAPI, **options: Any) -> httpx.AsyncClient:
    """An in-process client of an app."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", **options)


async def started(app: FastAPI, *, batch_size: int = 8, envs: int = 1, **env: Any) -> httpx.AsyncClient:
    """A client of a run with a trainer that has started and environments 0, 1, ..."""
    client = client_of(app)
    assert (await client.post("/register", json={**REGISTRATION, "batch_size": batch_size})).status_code == 200
    assert uids(await client.get("/batch")) is None
    for i in range(envs):
        answer = await client.post("/register-env", json={**ENV, **env})
        assert answer.json()["env_id"] == i
    return client


def memory_app(**settings: Any) -> FastAPI:
    """An app that keeps its run in memory."""
    return create_app(**settings)


@contextmanager
def small_disk(folder, megabytes):
    """A tmpfs; skips where mounting is not permitted."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


class ServerRefused(Exception):
    """run-api did not start; its log says why."""


class ServerProcess:
    """A `run-api` process on a free port; start again with the same folder to see what survived."""

    def __init__(self, folder: Path, *options: str, files: int | None = None) -> None:
        self.folder = folder
        self._files = files
        self._options = options
        self._process: Child | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when it listens."""
        arguments = ["--port", "0", "--state-dir", str(self.folder), *self._options]
        log = self.folder.parent / "server.log"
        self._process = Child("atroposlib.cli.run_api", arguments, log, files=self._files)
        line = self._process.stdout.readline()
        match = re.search(r"http://\S+", line)
        if match is None:
            raise ServerRefused(f"run-api said {line!r} and exited with {self.stop(signal.SIGTERM)}")
        self.url = match[0]

    def stop(self, sign: signal.Signals) -> int:
        """Send a signal; the exit code."""
        assert self._process is not None
        self._process.send_signal(sign)
        code = self._process.wait(timeout=60)
        self._process.stdout.close()
        self._process = None
        return code

    def kill(self) -> None:
        """kill -9."""
        self.stop(signal.SIGKILL)

    def end(self) -> None:
        """Kill it if it still runs."""
        if self._process is not None:
            self.kill()


@contextmanager
def server_process(folder: Path, *options: str, files: int | None = None) -> Iterator[ServerProcess]:
    """A started server that is gone afterwards; `files`: how many it may have open."""
    server = ServerProcess(folder, *options, files=files)
    server.start()
    try:
        yield server
    finally:
        server.end()


def register_run(client: httpx.Client, *, batch_size: int = 8) -> None:
    """A started trainer and environment 0."""
    assert client.post("/register", json={**REGISTRATION, "batch_size": batch_size}).status_code == 200
    assert client.get("/batch").json() == {"batch": None}
    assert client.post("/register-env", json=ENV).json()["env_id"] == 0
