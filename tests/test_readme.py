"""What the README shows is what is there."""

import contextlib
import importlib.util
import json
import os
import pydoc
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from atroposlib.cli import new
from atroposlib.cli.main import COMMANDS
from atroposlib.errors import ConfigError
from atroposlib.examples import addition
from atroposlib.testing import ScriptedEngine, write_tokenizer

ROOT, PACKAGE = Path(__file__).parents[1], "atroposlib"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_shows_the_example_as_it_is():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks == [Path(addition.__file__).read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


NAMES = COMMANDS | {word.also: word for word in COMMANDS.values() if word.also}
BEGINS = re.compile(rf"(atropos|python|bash|{'|'.join(word.also for word in COMMANDS.values() if word.also)}) \S")


def commands_of(text):
    """The commands that a text shows, in blocks, indented or within a sentence, as words."""
    blocks = "\n".join(re.findall(r"```(?:bash|sh)?\n(.*?)```", text, re.DOTALL))
    lines = [*blocks.splitlines(), *re.findall(r"^    (.*)", text, re.MULTILINE), *re.findall(r"`([^`\n]+)`", text)]
    shown = [re.split(r"   #|  # |   \(|  +then| #  ", line)[0].strip() for line in lines]
    joined = [line.partition(" && ")[2] if line.startswith(("pip ", "(mkdir")) else line for line in shown]
    return [shlex.split(line.replace("\\|", "|").rstrip("\\")) for line in joined if BEGINS.match(line)]


def unknown_in(words):
    """Return what is not there of a command: the command itself, an option, a file of this repository."""
    tops = ("configs/", "tests/", "benchmarks/", "examples/", "environments/", "slurm/", "docs/", "atroposlib/")
    yield from (word for word in words if word.startswith(tops) and not any(ROOT.glob(word.split()[0].rstrip("/"))))
    if words[0] == "python" and words[1] == "-m":
        yield from [words[2]] if not words[2].endswith(".NAME") and importlib.util.find_spec(words[2]) is None else []
    if words[0] in ("python", "bash"):
        return
    name, *rest = words[1:] if words[0] == "atropos" else words
    if name not in NAMES:
        yield from [] if name.startswith("-") or name in PLACEHELSEWHEREERS else [name]
        return
    app = NAMES[name].typer_app()
    if app is None:  # it reads its command line itself
        return
    command = get_command(app)
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        several, known = rest.pop(0).split("|"), command.commands
        yield from set(several) - known.keys()
        command = known.get(several[0], command)
    known = {flag for option in command.params for flag in option.opts + option.secondary_opts} | {"--help"}
    asked = {word.partition("=")[0] for word in rest if word.startswith("--") and not word.startswith("--env.")}
    if not (command.context_settings or {}).get("ignore_unknown_options"):
        yield from asked - known


PLACEHELSEWHEREERS = {"COMMAND", "..."}
ALL_PAGES = [*PAGES, *ROOT.glob("C*.md"), *sorted((ROOT / PACKAGE).rglob("README.md")), ROOT / "slurm/README.md"]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_the_repository_that_a_page_names_is_there(page):
    text = page.read_text()
    tops = {each.name for folder in (ROOT, ROOT / PACKAGE) for each in folder.iterdir()} - {"runs", "data"}
    paths = re.findall(r"`([\w.*-]+/[\w./*-]*)`", text)
    named = {path.rstrip("/") for path in paths if path.partition("/")[0] in tops} - ELSEWHERE
    places = [ROOT, ROOT / PACKAGE, page.parent]
    assert [path for path in named if not any(any(place.glob(path)) for place in places)] == []
    if page.name == "README.md" and page.parent != ROOT:
        modules = set(re.findall(r"`(\w+\.py)`", text)) - ELSEWHERE
        assert [name for name in modules if not any(page.parent.rglob(name))] == []


ELSEWHERE = {"prepare_sft_data.py", "split_dataset.py", "test_causal_env.py", "configs/trainer/data"}
"""Files of another repository, of the tests, of a user's own."""


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_shows_is_there_with_its_options_and_its_files(page):
    assert {
        " ".join(words): [*unknown] for words in commands_of(page.read_text()) if (unknown := set(unknown_in(words)))
    } == {}


def helps_below(name, command):
    """The help of a command and of those below it, each by its words."""
    yield name, command.help or ""
    for word, below in command.commands.items() if isinstance(command, TyperGroup) else ():
        yield from helps_below(f"{name} {word}", below)


HELPS = dict(
    pair for name, word in COMMANDS.items() if (app := word.typer_app()) for pair in helps_below(name, get_command(app))
)


@pytest.mark.parametrize("name", HELPS)
def test_every_command_that_a_help_shows_is_there_with_its_options(name):
    shown = commands_of(HELPS[name].replace("\n  ", "\n    "))
    assert shown or name == "data"
    assert {" ".join(words): [*unknown] for words in shown if (unknown := set(unknown_in(words)))} == {}


def test_the_example_runs_in_process_and_evaluate_as_a_user_starts_it(tmp_path):
    def answer(prompt):
        left, right = map(int, re.findall(r"(\d+) \+ (\d+)", prompt)[-1])
        return [f"\\boxed{{{left + right}}}", "no"]

    script = shutil.copy(addition.__file__, tmp_path / "addition.py")
    with ScriptedEngine(answer, write_tokenizer(tmp_path / "tokenizer")) as engine:
        for mode, more, made in (
            ("process", ["--env.total_steps", "2"], "data/addition.jsonl"),
            ("evaluate", ["--env.data_dir_to_save_evals", "results"], "results/metrics.json"),
        ):
            command = [sys.executable, str(script), mode, *engine.flags, *more]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            assert (tmp_path / made).exists()
            assert "PyTorch" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if "atroposlib.envs.cli" in line]) == 3


def test_the_example_serves_a_trainer_and_its_rollouts_become_a_set(tmp_path):
    def answer(prompt):
        left, right = map(int, re.findall(r"(\d+) \+ (\d+)", prompt)[-1])
        return [f"\\boxed{{{left + right}}}", "no"]

    script = shutil.copy(addition.__file__, tmp_path / "addition.py")
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(ScriptedEngine(answer, write_tokenizer(tmp_path / "tokenizer")))

        def start(*words):
            process = subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        api = start("-m", "atroposlib.cli.run_api", "--port", "0", "--memory")
        url = api.stdout.readline().split()[-1]
        start("-m", "atroposlib.example_trainer.fake_trainer", "--api-url", url, "--batch-size", "16")
        serving = [str(script), "serve", *engine.flags, "--env.rollout_server_url", url, "--env.total_groups", "4"]
        stored = ["--env.data_path_to_save_groups", "data/served.jsonl"]
        served = subprocess.run(
            [sys.executable, *serving, *stored], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert served.returncode == 0, served.stderr
    exporting = ["-m", "atroposlib.cli.sft", "data/served.jsonl", "--output", "sft.jsonl"]
    assert subprocess.run([sys.executable, *exporting], cwd=tmp_path, timeout=60, check=True).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 4  # the right half of four groups of eight
    assert {turn["role"] for row in rows for turn in row["completion"]} == {"assistant"}


KINDS = {"": "SingleTurnEnv", "multi_turn": "MultiTurnEnv", "tools": "MultiTurnEnv", "judge": "SingleTurnEnv"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_environment_is_its_example_under_another_name(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    new.env("word_game", **{name: name == kind for name in ("multi_turn", "tools", "judge")}, folder=".")
    assert "python -m pytest test_word_game.py" in capsys.readouterr().out
    text = (tmp_path / "word_game.py").read_text()
    assert 'name = "word_game"' in text
    assert f"class WordGameEnv({KINDS[kind]})" in text
    assert "from word_game import" in (tmp_path / "test_word_game.py").read_text()


def test_a_new_environment_hides_no_module_that_is_installed(tmp_path):
    with pytest.raises(ConfigError, match=r"installed module 'json', and json\.py would be imported in its place"):
        new.env("json", folder=str(tmp_path))
    new.env("json", package=True, folder=str(tmp_path))
    assert (tmp_path / "json-env/json_env/json.py").exists()


def test_the_test_of_a_new_environment_passes_as_written(tmp_path):
    new.env("sums", multi_turn=False, tools=False, judge=False, folder=str(tmp_path))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sums.py"]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=bare)
    assert done.returncode == 0, done.stdout


def test_the_page_of_the_api_shows_the_members_that_it_names():
    for place, options in re.findall(r"^::: (\S+)\n((?: .*\n)*)", (ROOT / "docs/api.md").read_text(), re.MULTILINE):
        chosen = (yaml.safe_load(options) or {"options": {}})["options"]
        shown = importlib.import_module(place) if "members" not in chosen else pydoc.locate(place)
        named = dir(shown) if chosen.get("inherited_members") else vars(shown)
        assert {*chosen.get("members", [])} <= {*named}, place
