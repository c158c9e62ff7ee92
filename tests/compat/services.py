"""The packages under comparison, and services of either as child processes on loopback."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
START_TIMEOUT_S = 120
BATCH_TIMEOUT_S = 240


@dataclass(frozen=True)
class Package:
    """An interpreter that has one of the two packages."""

    name: str
    python: str

    def api_command(self, port: int, folder: Path) -> list[str]:
        state = ["--state-dir", str(folder / "api-state")] if self.name == "ours" else []
        return [self.python, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port), *state]


class Services:
    """Child processes; each has a log file in the test's folder and is stopped at the end."""

    def __init__(self, folder: Path, tokenizer_dir: Path) -> None:
        self.folder = folder
        self.tokenizer_dir = tokenizer_dir
        self._running: list[subprocess.Popen] = []

    def start(self, name: str, command: list[str], **environment: str) -> subprocess.Popen:
        inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "ATROPOS_API_TOKEN")}
        fixed = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
        with (self.folder / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**inherited, **fixed, **environment},
                stdout=subprocess.PIPE if name == "trainer" else log,
                stderr=log,
            )
        self._running.append(child)
        return child

    def start_api(self, package: Package) -> str:
        port = free_port()
        child = self.start("api", package.api_command(port, self.folder))
        return self._ready(f"http://127.0.0.1:{port}", "/info", child, "api")

    def start_engine(self) -> str:
        port = free_port()
        child = self.start("engine", [sys.executable, str(HERE / "toy_engine.py"), str(port), str(self.tokenizer_dir)])
        return self._ready(f"http://127.0.0.1:{port}", "/health", child, "engine")

    def start_env(self, package: Package, api_url: str, engine_url: str, *, steps: int) -> subprocess.Popen:
        return self.start(
            "env",
            [package.python, str(HERE / "toy_env.py"), "serve", "--env.rollout_server_url", api_url],
            TOY_TOKENIZER=str(self.tokenizer_dir),
            TOY_ENGINE=engine_url,
            TOY_STEPS=str(steps),
        )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for child in self._running:
            child.terminate()
        for child in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            child.kill()
            child.wait()
            if child.stdout:
                child.stdout.close()

    def _ready(self, url: str, path: str, child: subprocess.Popen, name: str) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and child.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(url + path, timeout=2).close()
                return url
            time.sleep(0.1)
        raise RuntimeError(f"{name} did not answer {url}{path}; its log:\n{self.log(name)}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
