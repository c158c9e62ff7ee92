"""`atropos new`: files to begin with."""

import importlib.util
import keyword
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from atroposlib.cli.boundary import App, run
from atroposlib.errors import ConfigError
from atroposlib.paths import expand_path, write_text_atomic

HELP = """Write files to begin with.

Examples:
  atropos new env sums
  atropos new env hangman --multi-turn
  atropos new env hangman --multi-turn --package
"""
_KINDS = {"multi_turn": ("guess", "GuessEnv"), "tools": ("calculator", "CalculatorEnv"), "judge": ("haiku", "HaikuEnv")}
_YAML = """# python {name}.py process --config {name}.yaml
env:
  total_steps: 20 # groups
  data_path_to_save_groups: data/{name}.jsonl
  tokenizer_name: smollm2-135m # of the model below
openai:
  base_url: http://localhost:9004/v1 # where `atropos engine` answers
  model_name: smollm2-135m
  server_type: sglang # or vllm, openai
  api_key: x
"""

_PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}-env"
version = "0.1.0"
description = "The environment {name} for atroposlib"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["atroposlib"]

[project.entry-points."atroposlib.environments"]
{name} = "{name}_env.{name}:{own_class}"

[tool.setuptools]
packages = ["{name}_env"]
"""
_README = """# {name}

An environment for `atroposlib`. Say here what is asked, what scores how much,
and which data it needs.

    pip install .
    atropos env info {name}
    atropos env check {name}
    atropos env run {name} process --config {name}.yaml

In datagen's YAML its name stands where a file would: `environment: {{script: {name}}}`.
"""

app = App(HELP)


@app.callback()
def new() -> None:
    """Keep `env` a word of its own."""


@app.command()
def env(
    name: Annotated[str, typer.Argument(help="Of the environment and its files, such as hangman.")],
    multi_turn: Annotated[bool, typer.Option("--multi-turn", help="Several turns with answers in between.")] = False,
    tools: Annotated[bool, typer.Option("--tools", help="Tool calls that are executed.")] = False,
    judge: Annotated[bool, typer.Option("--judge", help="A model scores the answers.")] = False,
    package: Annotated[
        bool, typer.Option("--package", help="A project to install: its environment is then known by its name.")
    ] = False,
    folder: Annotated[str, typer.Option(help="Where the files go.")] = ".",
) -> None:
    """Write an environment with its settings and its test, all of which work as they are.

    Examples:
      atropos new env sums
      atropos new env shopping --tools --folder my_envs
      atropos new env chess --package
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is no name of a Python module; use letters, digits and _, as in word_game")
    chosen = [kind for kind, wanted in {"multi_turn": multi_turn, "tools": tools, "judge": judge}.items() if wanted]
    if len(chosen) > 1:
        raise ConfigError("give one of --multi-turn, --tools and --judge; each writes a whole environment")
    example, example_class = _KINDS[chosen[0]] if chosen else ("addition", "AdditionEnv")
    where = expand_path(folder, what="--folder")
    written = _package(name, example, example_class) if package else _files(name, example, example_class)
    where = where / f"{name}-env" if package else where
    if existing := [file for file in written if (where / file).exists()]:
        raise ConfigError(f"{where / existing[0]} exists; choose another name or --folder")
    if not package and importlib.util.find_spec(name):
        there = f"there is an installed module {name!r}"
        raise ConfigError(f"{there}, and {name}.py would be imported in its place; choose another name, or --package")
    where.mkdir(parents=True, exist_ok=True)
    for file, text in written.items():
        (where / file).parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(where / file, text)
    if package:
        print(
            f"wrote {', '.join(written)}. Then:\n\ncd {where}\npip install -e . && python -m pytest\n"
            f"atropos env check {name}\natropos engine\natropos env run {name} process --config {name}.yaml"
        )
        return
    inside = "" if where.resolve() == Path.cwd() else f"cd {where}\n"
    print(
        f"wrote {', '.join(written)}. Three commands, the second in a terminal of its own:\n\n{inside}"
        f"python -m pytest test_{name}.py\natropos engine\npython {name}.py process --config {name}.yaml\n\n"
        f"Then `atropos sft data/{name}.jsonl --output sft.jsonl`, or `python {name}.py serve` for a trainer."
    )


def _files(name: str, example: str, example_class: str) -> dict[str, str]:
    """The files by name: those of an example of this package, renamed."""
    source, own_class = files("atroposlib.examples"), _class_name(name)

    def renamed(file: str) -> str:
        text = (source / file).read_text(encoding="utf-8")
        text = text.replace(f"atroposlib.examples.{example} ", f"{name} ").replace(example_class, own_class)
        return text.replace(f'name = "{example}"', f'name = "{name}"')

    return {
        f"{name}.py": renamed(f"{example}.py"),
        f"{name}.yaml": _YAML.format(name=name),
        f"test_{name}.py": renamed(f"test_{example}.py"),
    }


def _package(name: str, example: str, example_class: str) -> dict[str, str]:
    """The files of a project by name: a package with the environment, its test, its settings."""
    flat = _files(name, example, example_class)
    test = flat[f"test_{name}.py"].replace(f"from {name} import", f"from {name}_env.{name} import")
    facts = {"name": name, "own_class": _class_name(name)}
    return {
        "pyproject.toml": _PYPROJECT.format(**facts),
        "README.md": _README.format(**facts),
        f"{name}_env/__init__.py": "",
        f"{name}_env/{name}.py": flat[f"{name}.py"],
        f"{name}.yaml": flat[f"{name}.yaml"].replace(f"python {name}.py process", f"atropos env run {name} process"),
        f"tests/test_{name}.py": test,
    }


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_") if part) + "Env"


def main() -> None:
    run(app, "atropos new")


if __name__ == "__main__":
    main()
