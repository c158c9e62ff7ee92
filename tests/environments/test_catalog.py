"""Environments by name, and the check that every one of ours passes."""

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atroposlib import examples
from atroposlib.cli.new import env as new_env
from atroposlib.environments import check as check_module
from atroposlib.environments import community
from atroposlib.environments.check import Finding, check, missing
from atroposlib.environments.command import app
from atroposlib.envs import catalog
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.cli import MODES
from atroposlib.errors import ConfigError, DataError
from atroposlib.launch.config import load_config
from benchmarks import environment_table as table

OURS = {
    name: f"{entry.module}:{entry.attribute}"
    for name, entry in catalog.entries().items()
    if entry.package == "atroposlib"
}
WHOLE = ("countdown", "word_guess")
"""What is tried in all modes here; `atropos env check --all` tries all."""
TRIED_ELSEWHERE = ("gsm8k", "tool_use_interleaved")
"""Their code is that of math and tool_use_multiturn; they run in test_gsm8k and test_tool_use."""


@pytest.mark.parametrize("name", [name for name in OURS if name not in TRIED_ELSEWHERE])
def test_every_environment_of_ours_passes_its_check(name, tmp_path):
    env_cls = catalog.load(name)
    if wanted := missing(env_cls):
        pytest.skip(f"needs {wanted}")
    modes = tuple(MODES) if name in WHOLE else ("process",) if name != "reasoning_gym" else ()  # it loads much
    problems = 6 if hasattr(env_cls, "sandbox") else 12  # a process or more for each reply
    findings = list(check(env_cls, tmp_path, modes=modes, problems=problems))
    assert [str(finding) for finding in findings if finding.fault] == []
    assert [finding.what for finding in findings if finding.what in MODES] == list(modes)


BEGINNINGS = [Path(community.__file__).with_name("template_env.py")]
BEGINNINGS += [Path(examples.__file__).with_name(f"{name}.py") for name in ("addition", "calculator", "guess", "haiku")]


@pytest.mark.parametrize("file", BEGINNINGS, ids=lambda file: file.stem)
def test_what_authors_begin_with_passes_the_check_that_they_are_told_to_run(file, tmp_path):
    modes = tuple(MODES) if file == BEGINNINGS[0] else ("process",)
    findings = list(check(catalog.load(str(file)), tmp_path, modes=modes))
    assert [str(finding) for finding in findings if finding.fault] == []


def test_a_new_package_declares_the_environment_that_it_holds(tmp_path, monkeypatch, capsys):
    new_env("word_game", multi_turn=True, package=True, folder=str(tmp_path))
    project = tmp_path / "word_game-env"
    written = tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"][catalog.GROUP]
    assert written == {"word_game": "word_game_env.word_game:WordGameEnv"}
    monkeypatch.syspath_prepend(str(project))
    declare(monkeypatch, *written.items())
    assert catalog.load("word_game").name == "word_game"
    assert catalog.file_of("word_game") == project / "word_game_env" / "word_game.py"
    assert "from word_game_env.word_game import" in (project / "tests" / "test_word_game.py").read_text()
    assert "atropos env check word_game" in capsys.readouterr().out


DISHONEST = '''"""Asks for a number."""

from atroposlib.environments.single_turn import SingleTurnEnv, local_engine, SingleTurnConfig


class PleasedEnv(SingleTurnEnv):
    """Is pleased with whatever it gets."""

    name = "pleased"

    @classmethod
    def config_init(cls):
        return SingleTurnConfig(), local_engine()

    def make(self, rng, level):
        return {"question": f"Say {rng.random()}."}

    def gold(self, item):
        return item["question"]

    def grade(self, said, item):
        return 1.0
'''


def test_a_check_finds_rewards_that_are_not_honest_and_files_that_cannot_be_started(tmp_path):
    file = tmp_path / "pleased.py"
    file.write_text(DISHONEST)
    faults = {each.what: each.fault for each in check(catalog.load(str(file)), tmp_path, modes=()) if each.fault}
    assert faults.keys() == {"documentation", "honest rewards"}
    assert "does not end with `if __name__" in faults["documentation"]
    assert "junk scores 1.00" in faults["honest rewards"]
    assert "the constant reply" in faults["honest rewards"]


def test_a_check_of_all_names_what_lacks_an_extra_and_what_fails_costs_itself(monkeypatch):
    declare(
        monkeypatch,
        ("broken", "no_such_module:Env"),
        ("fine", OURS["countdown"]),
        ("lacking", OURS["gym_taxi"]),
    )
    monkeypatch.setattr(catalog.load("lacking"), "needs", "no_such_module")
    monkeypatch.setattr(check_module, "check", lambda *given: iter([Finding("process", note="done")]))
    done = CliRunner().invoke(app, ["check", "--all"])
    assert done.stdout.splitlines()[1:] == [
        "fine: ok    process: done",
        "lacking: skipped, it needs: pip install 'atroposlib[gymnasium]'",
        "1 environments passed, 1 skipped, 1 failed ['broken']",
    ]
    assert done.stdout.startswith("broken: FAIL  import: environment 'broken' of ? cannot be imported")
    assert done.exit_code == 1


BAD_FILES = {
    "no environment": ("x = 1\n", "found none"),
    "two of them": ("from atroposlib.envs.base import BaseEnv\nclass A(BaseEnv): ...\nclass B(BaseEnv): ...\n", "A, B"),
    "a package that is not there": ("import no_such_package\n", "No module named 'no_such_package'"),
}


@pytest.mark.parametrize(("text", "said"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_no_environment_is_refused(tmp_path, text, said):
    (tmp_path / "odd.py").write_text(text)
    with pytest.raises(ConfigError, match=said):
        catalog.load(str(tmp_path / "odd.py"))


def test_a_name_that_nobody_declared_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'countdown'"):
        catalog.load("countdwon")


def declare(monkeypatch, *points):
    made = [EntryPoint(name, value, catalog.GROUP) for name, value in points]
    monkeypatch.setattr(catalog, "entry_points", lambda group: made)


def test_what_a_package_declares_and_cannot_load_costs_itself(monkeypatch):
    declare(
        monkeypatch, ("broken", "no_such_module:Env"), ("odd", "json:dumps"), ("base", "atroposlib.envs.base:BaseEnv")
    )
    assert list(catalog.entries()) == ["base", "broken", "odd"]
    assert catalog.load("base") is BaseEnv
    for name, said in {"broken": "cannot be imported", "odd": "no subclass of BaseEnv"}.items():
        with pytest.raises(ConfigError, match=said):
            catalog.load(name)


def test_two_packages_with_one_name_are_told_apart_by_neither(monkeypatch):
    declare(monkeypatch, ("twice", "a:A"), ("twice", "b:B"))
    with pytest.raises(ConfigError, match="both declare an environment 'twice'"):
        catalog.entries()


def test_datagen_takes_a_name_where_it_takes_a_file(tmp_path):
    config = {"name": "x", "run_dir": str(tmp_path), "problems": 1, "responses": 2}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**config, "environment": {"script": "countdown"}}))
    assert load_config(path).environment.script.endswith("atroposlib/environments/countdown_env.py")


def test_one_is_listed_shown_and_run_by_its_name():
    def said(*words):
        return CliRunner().invoke(app, words)

    assert "Score 1.0 for an expression that is right" in said("list").stdout
    assert "Numbers lie between 1 and this." in said("info", "countdown").stdout
    shown = said("run", "countdown", "process", "--help")
    assert (shown.exit_code, "--env.largest" in shown.stdout) == (0, True)
    assert said("run", "countdown", "dance").exit_code == 2


def test_the_readme_has_the_table_that_the_command_makes():
    readme = table.README.read_text(encoding="utf-8")
    assert table.with_table(readme, table.table()) == readme, "run `python -m benchmarks.environment_table --write`"
    verifiable = {name for name in OURS if getattr(catalog.load(name), "is_verifiable", False)}
    assert table.read_measured().keys() == verifiable


def test_a_readme_without_a_place_for_the_table_is_refused():
    with pytest.raises(DataError, match="has no place for the table"):
        table.with_table("# Environments", "| a |")
