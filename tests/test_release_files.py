"""What a release says of itself agrees with the package."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from atroposlib import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_the_changelog_begins_with_this_version():
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert newest.split()[1] == __version__


def test_the_workflow_runs_ci_on_every_python_from_the_lowest_on():
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["run"]
    assert job["steps"][-1] == {"run": ".ci/run"}
    versions = [tuple(map(int, version.split("."))) for version in job["strategy"]["matrix"]["python"]]
    lowest = int(PROJECT["requires-python"].removeprefix(">=3."))
    assert versions == [(3, minor) for minor in range(lowest, lowest + 4)]


@pytest.mark.parametrize(
    "file", ["containers/Dockerfile", "containers/atropos.def", "pyproject.toml", "CONTRIBUTING.md"]
)
def test_extras_that_are_named_exist(file):
    named = re.findall(r"(?:/src|atroposlib|\.)\[([a-z,]+)\]|EXTRAS=([a-z,]+)", (ROOT / file).read_text())
    assert named
    assert {extra for pair in named for extra in "".join(pair).split(",")} <= EXTRAS.keys()
