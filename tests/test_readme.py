"""What the README shows is what is there."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from atroposlib.cli import new
from atroposlib.cli.main import COMMANDS
from atroposlib.examples import addition
from atroposlib.testing import ScriptedEngine, write_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_shows_the_example_as_it_is():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks == [Path(addition.__file__).read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def commands_of(page):
    """The commands that a page shows in its blocks, as words."""
    text = page.read_text()
    blocks = "\n".join(re.findall(r"```(?:bash|sh)?\n(.*?)```", text, re.DOTALL))
    lines = [*blocks.splitlines(), *re.findall(r"^    (.*)", text, re.MULTILINE)]
    shown = [line.partition("   #")[0].partition("  # ")[0].partition("   (")[0].strip() for line in lines]
    return [shlex.split(line) for line in shown if re.match(r"(atropos|python -m|atropos-grpo-run) ", line)]


@pytest.mark.parametrize("name", ["agents", "evaluation"])
def test_every_command_that_a_page_shows_is_there_with_its_options_and_its_files(name):
    commands = commands_of(ROOT / "docs" / f"{name}.md")
    assert len(commands) >= 3
    for words in commands:
        assert [word for word in words if word.startswith("configs/") and not (ROOT / word).exists()] == [], words
        if words[0] == "python":
            assert importlib.util.find_spec(words[2]), words
        elif words[0] == "atropos":
            app, rest = COMMANDS[words[1]].typer_app(), words[2:]
            assert app is not None, words
            command = get_command(app)
            while isinstance(command, TyperGroup):
                command = command.commands[rest.pop(0)]
            known = {flag for option in command.params for flag in option.opts}
            asked = [word for word in rest if word.startswith("--") and not word.startswith("--env.")]
            assert set(asked) <= known, words


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


def test_the_test_of_a_new_environment_passes_as_written(tmp_path):
    new.env("sums", multi_turn=False, tools=False, judge=False, folder=str(tmp_path))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sums.py"]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=bare)
    assert done.returncode == 0, done.stdout
