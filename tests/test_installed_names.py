"""What is installed adds no other name at the top, so that a user's own `environments` folder is what runs."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
NAMES = {"atroposlib", "atroposlib_engine", "atroposlib_verifiers"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of installed packages that holds the wheel, built without network from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    sources, site = folder / "sources", folder / "site"
    for name in NAMES:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for link in ("environments", "example_trainer"):
        (sources / link).symlink_to(f"atroposlib/{link}")
    build = "import setuptools.build_meta as backend; print(backend.build_wheel('..'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=sources, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(folder / built.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(site)
    return site


def test_the_wheel_holds_our_top_level_names_only(site):
    names = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert names == NAMES
    assert {path.name for path in (site / "atroposlib").iterdir()} >= {"environments", "example_trainer"}


def test_the_wheel_brings_the_settings_of_its_commands_and_what_they_name(site, tmp_path):
    code = (
        "from importlib.resources import files\n"
        "from pathlib import Path\n"
        "from atroposlib.launch.config import load_config\n"
        "for path in sorted((Path(str(files('atroposlib'))) / 'configs').glob('*.yaml')):\n"
        "    print(path.name, load_config(path).environment.script)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(site)}
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    scripts = dict(line.split() for line in said.stdout.splitlines())
    assert {"quickstart.yaml", "intern_bootcamp_r1.yaml"} <= scripts.keys()
    assert all(Path(script).is_relative_to(site) and Path(script).is_file() for script in scripts.values())
    assert (site / "atroposlib" / "configs" / "trainer" / "grpo.yaml").is_file()


def test_an_editable_install_maps_our_top_level_names_only():
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.partition(".")[0] for name in find_packages(str(ROOT), include=include)} == NAMES


@pytest.mark.parametrize("command", [["-m", "environments.gsm8k_server"], ["environments/gsm8k_server.py"]])
def test_a_users_own_environments_folder_is_what_runs(site, tmp_path, command):
    own = tmp_path / "environments"
    own.mkdir()
    (own / "helper.py").write_text("WHOSE = 'mine'\n")
    (own / "gsm8k_server.py").write_text(
        "import importlib.util\n"
        "if importlib.util.find_spec('environments'):\n"
        "    from environments.helper import WHOSE\n"
        "else:\n"
        "    from helper import WHOSE\n"
        "import atroposlib.environments\n"
        "print(WHOSE, atroposlib.__file__)\n"
    )
    said = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["mine", str(site / "atroposlib" / "__init__.py")]
