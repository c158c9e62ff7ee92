"""What an environment's own command line says of its settings, before an engine is loaded for it."""

import subprocess
import sys
import tempfile
from pathlib import Path

from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.model_checks import Model
from atroposlib.launch.plan import environment_flags, environment_yaml

_NOWHERE = "http://127.0.0.1:1"
_DEADLINE_S = 300.0  # a script may import a great deal


def check_environment(config: DatagenConfig, model: Model, *, starts: bool) -> tuple[list[str], list[str]]:
    """Return what `SCRIPT serve --check` finds wrong, and what it says; nothing is set up.

    An engine that runs already is asked, too, unless the run starts now and asks it as soon itself. One that the run
    starts is not there yet.
    """
    script, engine = config.environment.script, config.engine
    url = engine.base_url.rstrip("/").removesuffix("/v1") if engine.kind == "external" and engine.base_url else _NOWHERE
    check = "--check=settings" if starts or url == _NOWHERE else "--check"
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "environment.yaml"
        settings.write_text(environment_yaml(config, model, [url], _NOWHERE), encoding="utf-8")
        command = [sys.executable, script, "serve", "--config", str(settings), *environment_flags(config), check]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return [], [f"{script} serve --check did not end within {_DEADLINE_S:.0f} s; it was not waited for"]
    if done.returncode == 0:
        return [], done.stdout.splitlines()
    said = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
    return [f"environment.script {script} cannot start: {said[-1].removeprefix('error: ')}"], []
