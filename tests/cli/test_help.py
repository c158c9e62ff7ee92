"""What the commands say of themselves: one look, every word, the nearest name."""

import pkgutil
import re
import runpy
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from atroposlib import __version__, cli
from atroposlib.cli import main
from atroposlib.cli.boundary import command
from atroposlib.environments.intern_bootcamp import quarantine

APPS = {name: app for name, word in main.COMMANDS.items() if (app := word.typer_app())} | {
    "quarantine": command(quarantine.main)
}


def commands_below(words: tuple[str, ...], app) -> list[tuple[tuple[str, ...], object]]:
    if not isinstance(app, TyperGroup):
        return [(words, app)]
    return [
        (words, app),
        *(pair for name, each in app.commands.items() for pair in commands_below((*words, name), each)),
    ]


COMMANDS = {
    " ".join(words): app for name, app in APPS.items() for words, app in commands_below((name,), get_command(app))
}


def help_of(name: str) -> str:
    app = COMMANDS[name]
    with app.make_context(f"atropos {name}", [], resilient_parsing=True) as context:  # pyright: ignore
        return app.get_help(context)  # pyright: ignore


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "data"])
def test_help_shows_how_the_command_is_called(name):
    assert re.search(r"Examples?\b.*\n(  .*\n)*    .*(atropos|view-run|run-api|watcher)", help_of(name)), name


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_of_one_look(name):
    text = help_of(name)
    options = text.partition("Options:")[2]
    assert "-h, --help" in options
    assert not re.search(r"<(bool|int|float|str)|range>|list\[|╭|\{[A-Z]", text)
    assert "...\n" not in options  # a summary that was cut


WITH_A_COMMAND = sorted(
    name
    for name in {f"atroposlib.cli.{each.name}" for each in pkgutil.iter_modules(cli.__path__)}
    | {word.module for word in main.COMMANDS.values()}
    if hasattr(import_module(name), "main")
)


@pytest.mark.parametrize("module", WITH_A_COMMAND)
def test_python_m_runs_every_module_with_a_command(module, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code in (0, None)
    assert "usage:" in capsys.readouterr().out.lower()


def test_every_installed_command_has_a_word():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    also = {word.also for word in main.COMMANDS.values() if word.also} | {"atropos"}
    assert set(project["scripts"]) == also


@pytest.fixture
def atropos(monkeypatch, capsys):
    """Run the entry as a shell would, but in this process: exit code, and what it printed."""

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["atropos", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out + said.err  # pyright: ignore[reportReturnType]

    return call


CALLS = {
    "no word": ([], 2, "Usage: atropos COMMAND"),
    "help": (["--help"], 0, "Usage: atropos COMMAND"),
    "version": (["--version"], 0, f"atroposlib {__version__} "),
    "a word": (["status", "--help"], 0, "Usage: atropos status [OPTIONS]"),
    "an installed name as a word": (["run-api", "--help"], 0, "Usage: atropos run-api [OPTIONS]"),
    "a mistyped word": (["datagn"], 2, "did you mean 'datagen'?"),
    "a mistyped word below": (["data", "vlidate"], 2, "Did you mean 'validate'?"),
    "a mistyped option": (["sft", "--outptu", "x"], 2, "--output"),
}


@pytest.mark.parametrize(("words", "code", "said"), CALLS.values(), ids=CALLS)
def test_the_entry_says(atropos, words, code, said):
    ended, text = atropos(*words)
    assert ended == code
    assert said in text


def test_ctrl_c_while_a_command_is_imported_is_no_trace(monkeypatch, capsys):
    def stop(word):
        raise KeyboardInterrupt

    monkeypatch.setattr(main.Word, "run", stop)
    monkeypatch.setattr(sys, "argv", ["atropos", "quickstart"])
    with pytest.raises(SystemExit, match="130"):
        main.main()
    assert capsys.readouterr().err == "atropos quickstart: stopped\n"


COMPLETED = {
    "atropos dat": ["datagen", "data"],
    "atropos sft --ou": ["--output"],
    "atropos cluster s": ["submit", "status", "sync"],
}


@pytest.mark.parametrize(("line", "offered"), COMPLETED.items())
def test_the_shell_completes(atropos, monkeypatch, line, offered):
    asked = {"_ATROPOS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert atropos()[1].split() == offered
