"""`atropos new`: files to begin with."""

import keyword
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from atroposlib.cli.boundary import App, run
from atroposlib.errors import ConfigError
from atroposlib.paths import expand_path

HELP = """Write files to begin with.

Examples:

  atropos new env sums

  atropos new env hangman --multi-turn
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
    folder: Annotated[str, typer.Option(help="Where the files go.")] = ".",
) -> None:
    """Write an environment with its settings and its test, all of which work as they are.

    Examples:
      atropos new env sums
      atropos new env shopping --tools --folder my_envs
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is no name of a Python module; use letters, digits and _, as in word_game")
    chosen = [kind for kind, wanted in {"multi_turn": multi_turn, "tools": tools, "judge": judge}.items() if wanted]
    if len(chosen) > 1:
        raise ConfigError("give one of --multi-turn, --tools and --judge; each writes a whole environment")
    example, example_class = _KINDS[chosen[0]] if chosen else ("addition", "AdditionEnv")
    where = expand_path(folder, what="--folder")
    written = _files(name, example, example_class)
    if existing := [file for file in written if (where / file).exists()]:
        raise ConfigError(f"{where / existing[0]} exists; choose another name or --folder")
    where.mkdir(parents=True, exist_ok=True)
    for file, text in written.items():
        (where / file).write_text(text, encoding="utf-8")
    inside = "" if where.resolve() == Path.cwd() else f"cd {where}\n"
    print(
        f"wrote {', '.join(written)}. Three commands, the second in a terminal of its own:\n\n{inside}"
        f"python -m pytest test_{name}.py\natropos engine\npython {name}.py process --config {name}.yaml\n\n"
        f"Then `atropos sft data/{name}.jsonl --output sft.jsonl`, or `python {name}.py serve` for a trainer."
    )


def _files(name: str, example: str, example_class: str) -> dict[str, str]:
    """The files by name: those of an example of this package, renamed."""
    source = files("atroposlib.examples")
    own_class = "".join(part.capitalize() for part in name.split("_") if part) + "Env"

    def renamed(file: str) -> str:
        text = (source / file).read_text(encoding="utf-8")
        text = text.replace(f"atroposlib.examples.{example} ", f"{name} ").replace(example_class, own_class)
        return text.replace(f'name = "{example}"', f'name = "{name}"')

    return {
        f"{name}.py": renamed(f"{example}.py"),
        f"{name}.yaml": _YAML.format(name=name),
        f"test_{name}.py": renamed(f"test_{example}.py"),
    }


def main() -> None:
    run(app, "atropos new")


if __name__ == "__main__":
    main()
