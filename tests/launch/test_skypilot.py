"""The job for SkyPilot asks for a run that `atropos datagen` knows, and its package reads both files."""

import re
import shlex
from pathlib import Path
from string import Template

import yaml

from atroposlib.launch.config import load_config

ROOT = Path(__file__).parents[2]
JOB = yaml.safe_load((ROOT / "skypilot" / "datagen.yaml").read_text())


def test_the_job_runs_a_config_with_settings_that_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    command = Template(JOB["run"][JOB["run"].index("exec ") :]).substitute(JOB["envs"])
    _, _, verb, config, *flags = shlex.split(command)
    changes = [flags[at + 1] for at, flag in enumerate(flags) if flag == "--set"]
    settings = load_config(Path(config), changes, run_dir=flags[flags.index("--run-dir") + 1])
    assert verb == "datagen"
    assert (settings.run_dir, settings.engine.tp, settings.problems) == (f"/data/{JOB['envs']['NAME']}", 8, 50_000)
    assert settings.environment.env["task_name"] == "reasoning_gym"


def test_a_stopped_run_is_started_again_and_a_failed_one_is_not():
    recovery = JOB["resources"]["job_recovery"]
    assert (recovery["recover_on_exit_codes"], recovery["max_restarts_on_errors"]) == ([75], 0)


def test_the_data_lie_on_the_volume_of_the_other_file():
    volume = yaml.safe_load((ROOT / "skypilot" / "data.yaml").read_text())
    assert JOB["volumes"] == {"/data": volume["name"]}
    assert set(re.findall(r"\$(\w+)", JOB["run"])) == {*JOB["envs"]}
