"""`atropos env`: the environments that are installed, and one of them."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from atroposlib.cli.boundary import App, run
from atroposlib.envs import catalog
from atroposlib.envs.cli import MODES, help_text
from atroposlib.errors import ConfigError

HELP = """List environments by name, show, run and check them. A .py file stands for the environment that it defines.

Other packages add names by the entry-point group atroposlib.environments; `atropos new env NAME --package` writes one.

Examples:

  atropos env list

  atropos env run countdown process --env.total_steps 20

  atropos env check my_env.py
"""
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Options after the name, --help too, are the environment's."""

app = App(HELP)
Name = Annotated[str, typer.Argument(metavar="NAME", help="As `atropos env list` shows it, or a .py file.")]


@app.command("list")
def list_names() -> None:
    """Show the name of every environment, the package it comes with and what it does.

    Example:
      atropos env list
    """
    for entry in catalog.entries().values():
        try:
            says = entry.summary()
        except (ConfigError, OSError, SyntaxError) as error:
            says = f"({error})"
        print(f"{entry.name:<28} {entry.package:<14} {says}")


@app.command()
def info(name: Name) -> None:
    """Show what an environment does, where it comes from and all of its settings.

    Example:
      atropos env info countdown
    """
    env_cls = catalog.load(name)
    entry = catalog.entries().get(name)
    print(f"{env_cls.__module__}.{env_cls.__name__}" + (f", of the package {entry.package}\n" if entry else "\n"))
    print(help_text(env_cls, "process"))


@app.command("run", context_settings=_PASSED_ON)
def run_one(context: typer.Context, name: Name) -> None:
    """Run an environment: serve, process or evaluate, with the flags of its own command line.

    Examples:
      atropos env run countdown process --env.total_steps 20
      atropos env run my_env.py serve --config my_env.yaml
    """
    from atroposlib.envs.cli import main as run_environment

    if name in MODES or name.startswith("-"):
        raise ConfigError(f"{name!r} is no environment; write `atropos env run NAME {' | '.join(MODES)}`")
    raise typer.Exit(run_environment(catalog.load(name), context.args))


@app.command(context_settings=_PASSED_ON)
def check(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A name or a .py file.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every environment that is installed.")] = False,
) -> None:
    """Check an environment: documentation, config, its three modes against a scripted engine, honest rewards.

    Flags of its own command line may follow, such as a data set. Exit code 1: something is not as it should be.
    With --all, those that need a package or a name are told and left out.

    Examples:
      atropos env check my_env.py
      atropos env check mcqa_thinking --env.dataset my_questions.jsonl
      atropos env check --all
    """
    from atroposlib.environments.check import Finding, missing
    from atroposlib.environments.check import check as findings

    if every == bool(name):
        raise ConfigError("name one environment, or say --all")
    names, failed, skipped = [name] if name else [*catalog.entries()], set[str](), set[str]()
    for each in names:
        try:
            env_cls = catalog.load(each)
        except ConfigError as error:
            if name:
                raise
            failed.add(each)
            print(f"{each}: {Finding('import', fault=str(error))}", flush=True)
            continue
        if every and (wanted := missing(env_cls)):
            skipped.add(each)
            print(f"{each}: skipped, it needs: {wanted}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            for finding in findings(env_cls, Path(folder), context.args):
                print(f"{each}: {finding}", flush=True)
                if finding.fault is not None:
                    failed.add(each)
    if every:
        passed = len(names) - len(failed) - len(skipped)
        print(
            f"{passed} environments passed, {len(skipped)} skipped, {len(failed)} failed {sorted(failed) or ''}".strip()
        )
    if failed:
        raise typer.Exit(1)


def main() -> None:
    run(app, "atropos env")


if __name__ == "__main__":
    main()
