"""`atropos datagen configs/sglang_smoke.yaml` on a GPU: SGLang is started, tuned, killed midway, and it ends exact.

Skipped unless a GPU, sglang and these are there (ATROPOS_SGLANG_ARGS: further flags of the server, a JSON list):

    ATROPOS_SGLANG_MODEL=/path/of/model pytest -s tests/live/test_datagen_sglang.py
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

SMOKE = Path(__file__).parents[2] / "configs" / "sglang_smoke.yaml"
DEADLINE_S = 300
MODEL = os.environ.get("ATROPOS_SGLANG_MODEL", "")

pytestmark = pytest.mark.skipif(
    shutil.which("nvidia-smi") is None or not MODEL or importlib.util.find_spec("sglang") is None,
    reason="needs a GPU, sglang and ATROPOS_SGLANG_MODEL",
)


def run_file(folder: Path) -> Path:
    """The smoke config with this machine's model and flags."""
    settings = yaml.safe_load(SMOKE.read_text())
    settings["run_dir"] = str(folder / "run")
    settings["environment"]["script"] = str(SMOKE.parent / settings["environment"]["script"])
    settings["engine"] |= {"model": MODEL, "args": json.loads(os.environ.get("ATROPOS_SGLANG_ARGS", "[]"))}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def status(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "atroposlib.cli.status", str(folder / "run"), "--json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return json.loads(found.stdout) if found.returncode == 0 else {}


def groups_done(folder: Path) -> int:
    try:
        return json.loads((folder / "run" / "progress.json").read_text())["groups_done"]
    except (OSError, ValueError, KeyError):
        return 0


def test_two_thousand_problems_end_exact_although_the_engine_is_killed_midway(tmp_path):
    problems, responses = 2000, 16
    command = [sys.executable, "-m", "atroposlib.cli.datagen", str(run_file(tmp_path))]
    with (tmp_path / "out").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline, started = time.monotonic() + DEADLINE_S, time.monotonic()
        while groups_done(tmp_path) < problems // 3:
            assert process.poll() is None, (tmp_path / "out").read_text()[-3000:]
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()[-3000:]
            time.sleep(0.1)
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        pid = next(service["pid"] for service in record["services"] if service["name"] == "engine")
        os.kill(pid, signal.SIGKILL)
        killed_at = groups_done(tmp_path), time.monotonic() - started
        assert process.wait(DEADLINE_S) == 0, (tmp_path / "out").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()

    files = sorted((tmp_path / "run" / "rollouts").glob("*.jsonl"))
    groups = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    groups = [group for group in groups if "tokens" in group]
    assert sorted(int(group["item_key"]) for group in groups) == list(range(problems))
    assert {len(group["tokens"]) for group in groups} == {responses}
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert next(service["restarts"] for service in record["services"] if service["name"] == "engine") == 1
    log = (tmp_path / "run" / "logs" / "intern_bootcamp.log").read_text()
    limits = re.findall(r"groups at once: (\d+) -> (\d+)", log)
    print(f"killed at {killed_at[0]} groups after {killed_at[1]:.0f} s; whole run {time.monotonic() - started:.0f} s")
    print("groups at once:", " ".join(["start", *(new for _, new in limits)]))
    print(json.dumps({key: value for key, value in status(tmp_path).items() if not isinstance(value, list)})[:1500])
    print((tmp_path / "out").read_text()[-1500:])
