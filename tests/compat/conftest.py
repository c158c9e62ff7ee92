"""The packages under comparison, and services of either as child processes on loopback.

These tests install upstream's last release from PyPI (minutes, once), so they run only when asked:

    ATROPOS_COMPAT=1 python -m pytest tests/compat

ATROPOS_COMPAT_VENV names the folder of the side environment; default: in the user's cache.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
UPSTREAM = "atroposlib==0.4.0"
UNDECLARED = ["requests", "python-dotenv"]  # upstream imports them without saying so
START_TIMEOUT_S = 120
BATCH_TIMEOUT_S = 240


def pytest_collection_modifyitems(items):
    if os.environ.get("ATROPOS_COMPAT") == "1":
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason="set ATROPOS_COMPAT=1: it installs upstream's release from PyPI"))


@dataclass(frozen=True)
class Package:
    """An interpreter that has one of the two packages."""

    name: str
    python: str

    def api_command(self, port: int, folder: Path) -> list[str]:
        state = ["--state-dir", str(folder / "api-state")] if self.name == "ours" else []
        return [self.python, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port), *state]


@pytest.fixture(scope="session")
def packages():
    """By name: "ours" is what runs the tests, "upstream" a side environment."""
    cache = Path(os.environ.get("ATROPOS_CACHE", Path.home() / ".cache" / "atroposlib"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path(os.environ.get("ATROPOS_COMPAT_VENV", cache / f"compat-{UPSTREAM.replace('==', '-')}-py{version}"))
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", UPSTREAM, *UNDECLARED], check=True)
        (folder / "ready").touch()
    return {"ours": Package("ours", sys.executable), "upstream": Package("upstream", str(python))}


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    """A byte-level tokenizer with a ChatML template, as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=specials))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


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


@pytest.fixture
def services(tmp_path, tokenizer_dir):
    running = Services(tmp_path, tokenizer_dir)
    yield running
    running.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
