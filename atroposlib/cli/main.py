"""The `atropos` command: every command of the package as one word, each imported only when it is called."""

import difflib
import importlib
import os
import sys
from dataclasses import dataclass

import typer
from typer.core import TyperCommand, TyperGroup

from atroposlib import __version__
from atroposlib.cli.boundary import Click


@dataclass(frozen=True)
class Word:
    """One command of a module, which has no `app` where it reads its command line itself."""

    module: str
    summary: str
    also: str = ""  # the name it is installed under
    main: str = "main"
    app: str = "app"

    def run(self) -> None:
        getattr(importlib.import_module(self.module), self.main)()

    def typer_app(self) -> typer.Typer | None:
        """Return the command's options and help."""
        return getattr(importlib.import_module(self.module), self.app, None)


SECTIONS: dict[str, dict[str, Word]] = {
    "Begin": {
        "quickstart": Word(
            "atroposlib.cli.datagen",
            "Make a first dataset with a small model on the CPU.",
            main="quickstart_main",
            app="quickstart_app",
        ),
        "new": Word("atroposlib.cli.new", "Write an environment with its settings and its test."),
    },
    "Run": {
        "datagen": Word("atroposlib.cli.datagen", "Run engine, API, environment and export as one supervised job."),
        "collect": Word(
            "atroposlib.environments.causal.commands", "Collect demonstrations of an expert that needs no model."
        ),
        "train": Word(
            "atroposlib.example_trainer.run",
            "Train a model: engine, API, environment and trainer in one command.",
            "atropos-grpo-run",
        ),
        "env": Word("atroposlib.environments.command", "List, show, run and check environments by name."),
        "serve-env": Word(
            "atroposlib.environments.adapters.openenv_server", "Serve an environment to clients of OpenEnv."
        ),
        "eval": Word("atroposlib.environments.eval_environments.command", "Run benchmarks, show and compare results."),
        "status": Word("atroposlib.cli.status", "Show the progress of a run, running or not."),
        "runs": Word(
            "atroposlib.cli.status",
            "List the runs below a folder, with state and size.",
            main="runs_main",
            app="runs_app",
        ),
        "cluster": Word(
            "atroposlib.cli.cluster", "Queue jobs on a SLURM cluster over ssh, watch them, fetch the data."
        ),
    },
    "Data": {
        "sft": Word("atroposlib.cli.sft", "Turn rollouts into a supervised fine-tuning set.", "atropos-sft-gen"),
        "dpo": Word("atroposlib.cli.dpo", "Turn rollouts into preference pairs.", "atropos-dpo-gen"),
        "data": Word("atroposlib.cli.data", "Validate, count, compare, split, merge, describe and show rollout files."),
        "view": Word("atroposlib.cli.view_run", "Browse rollouts in the browser.", "view-run"),
        "view-multimodal": Word("atroposlib.cli.view_run_multimodal", "The same, with images.", "view-run-multimodal"),
    },
    "Parts": {
        "engine": Word("atroposlib.cli.engine", "Serve a model on CPU with SGLang's wire protocol."),
        "api": Word("atroposlib.cli.run_api", "Serve the trajectory API.", "run-api"),
        "grpo": Word("atroposlib.example_trainer.grpo", "Train on the batches of a running API.", "atropos-grpo"),
        "fake-trainer": Word(
            "atroposlib.example_trainer.fake_trainer",
            "Pull batches and discard them.",
            "atropos-fake-trainer",
        ),
        "watch-node": Word(
            "atroposlib.cli.inference_node_wandb_watcher",
            "Log to wandb which inference servers of a node answer.",
            "inference-node-wandb-watcher",
        ),
    },
}
COMMANDS = {name: word for section in SECTIONS.values() for name, word in section.items()}
_COMPLETION = ("--install-completion", "--show-completion")


def usage() -> str:
    """Return the help of `atropos` itself."""
    lines = ["Usage: atropos COMMAND [OPTIONS]    (atropos COMMAND --help shows its options)"]
    for title, words in SECTIONS.items():
        lines += ["", f"{title}:"]
        lines += [
            f"  {name:<16} {word.summary}" + (f" Also: {word.also}" if word.also else "")
            for name, word in words.items()
        ]
    return "\n".join(
        [
            *lines,
            "",
            "Options:",
            "  --version               Show the version.",
            "  --install-completion    Let this shell complete commands and options; --show-completion prints how.",
        ]
    )


def main() -> None:
    """Run one command. Exit 0 done, 1 failed with a sentence, 2 wrong usage."""
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name in _COMPLETION or "_ATROPOS_COMPLETE" in os.environ:
        typer.Typer(cls=_Completed, rich_markup_mode=None, invoke_without_command=True, callback=lambda: None)(
            prog_name="atropos"
        )
    if name in (None, "-h", "--help"):
        print(usage())
        sys.exit(0 if name else 2)
    if name in ("--version", "-V"):
        print(f"atroposlib {__version__} (Python {sys.version.split()[0]})")
        sys.exit(0)
    word = COMMANDS.get(name) or next((each for each in COMMANDS.values() if each.also == name), None)
    if word is None:
        near = difflib.get_close_matches(name, [*COMMANDS, *(each.also for each in COMMANDS.values())], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands are {', '.join(COMMANDS)}"
        print(f"atropos: there is no command {name!r}; {hint}", file=sys.stderr)
        sys.exit(2)
    del sys.argv[1]
    sys.argv[0] = f"atropos {name}"
    try:
        word.run()
    except KeyboardInterrupt:  # while it was imported; later each command says what it leaves
        print(f"atropos {name}: stopped", file=sys.stderr)
        sys.exit(130)


class _Completed(TyperGroup):
    """The commands as the shell's completion asks for them: only the one that is typed is imported."""

    def list_commands(self, ctx: Click) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Click, cmd_name: str) -> Click:
        """Return one command with its options, or only its name while it is being typed."""
        is_typed = cmd_name in os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
        app = COMMANDS[cmd_name].typer_app() if is_typed else None
        return typer.main.get_command(app) if app else TyperCommand(cmd_name, help=COMMANDS[cmd_name].summary)


if __name__ == "__main__":
    main()
