"""`atropos eval`: benchmarks of the table, and their results."""

from typing import Annotated, Any

import typer

from atroposlib.cli.boundary import App, run

HELP = """Run benchmarks of the table, show results, compare two of them.

Examples:

  atropos eval list

  atropos eval run arc --env.dataset arc.jsonl --env.scoring loglikelihood --env.data_dir_to_save_evals results/arc

  atropos eval compare results/before results/after
"""

app = App(HELP)


@app.command("list")
def list_benchmarks() -> None:
    """Show the benchmarks: kind, class, data set.

    Example:
      atropos eval list
    """
    from atroposlib.environments.eval_environments.kinds import benchmarks

    for name, row in benchmarks().items():
        print(f"{name:<18} {row.kind:<11} {row.cls:<22} {row.dataset} {row.config or ''} {row.split}")


@app.command(
    "run",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run_one(
    context: typer.Context, name: Annotated[str, typer.Argument(metavar="NAME", help="A row of the table.")]
) -> None:
    """Evaluate one benchmark; flags are those of an environment's evaluate. The same command resumes after a kill.

    Example:
      atropos eval run gsm8k --env.dataset gsm8k.jsonl --openai.base_url http://localhost:30000/v1
    """
    from atroposlib.environments.eval_environments.benchmark import load_class
    from atroposlib.envs.cli import main as run_environment

    env_cls: Any = load_class(name)  # its class attributes are narrower than the protocol's
    raise typer.Exit(run_environment(env_cls, ["evaluate", *context.args]))


@app.command("table")
def print_table(results: Annotated[list[str], typer.Argument(help="Folders of results.")]) -> None:
    """Show results as a table, with standard errors or intervals.

    Example:
      atropos eval table results/arc results/gsm8k
    """
    from atroposlib.environments.eval_environments.results import table

    print(table(results))


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="Folder of a result.")],
    second: Annotated[str, typer.Argument(help="Folder of another result on the same items.")],
) -> None:
    """Compare two results on the same items by a paired permutation test.

    Example:
      atropos eval compare results/before results/after
    """
    from atroposlib.environments.eval_environments.results import compare as compared

    found = compared(first, second)
    print(
        f"{found.items} items in common: {second} is better on {found.better}, worse on {found.worse}\n"
        f"difference of the means {found.difference:+.4f}, standard error {found.standard_error:.4f} (paired), "
        f"p = {found.p_value:.4f} (permutation test)"
    )


def main() -> None:
    run(app, "atropos eval")


if __name__ == "__main__":
    main()
