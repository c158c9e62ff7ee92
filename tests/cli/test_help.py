"""What the commands say of themselves."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atroposlib.cli import cluster, engine, inference_node_wandb_watcher, main, run_api
from atroposlib.cli.boundary import command
from atroposlib.environments.intern_bootcamp import quarantine

COMMANDS = {
    "atropos engine": (command(engine.engine, engine.HELP), []),
    "run-api": (command(run_api.serve, run_api.HELP), []),
    "atropos cluster submit": (cluster.app, ["submit"]),
    "atropos cluster status": (cluster.app, ["status"]),
    "atropos cluster sync": (cluster.app, ["sync"]),
    "atropos cluster logs": (cluster.app, ["logs"]),
    "inference-node-wandb-watcher": (command(inference_node_wandb_watcher.watch), []),
    "python -m atroposlib.environments.intern_bootcamp.quarantine": (command(quarantine.main), []),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_how_the_command_is_called(name):
    app, words = COMMANDS[name]
    done = CliRunner().invoke(app, [*words, "--help"])
    before, example, after = done.output.partition("Example")
    assert example, before
    assert f" {name}" in after


def test_every_installed_command_is_named():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert [name for name in project["scripts"] if name not in main.USAGE] == []
