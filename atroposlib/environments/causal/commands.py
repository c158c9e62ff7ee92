"""`atropos collect`: demonstrations of experts that need no language model."""

import asyncio
import importlib.util
import logging
import os
from typing import Annotated, Literal

import typer

from atroposlib.cli.boundary import App, run
from atroposlib.errors import DataError
from atroposlib.paths import expand_path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy: `--serial` computes as the workers do

collect_app = App("Collect demonstrations of experts that need no language model.")


@collect_app.callback()
def _collect() -> None:
    """Collect demonstrations of experts that need no language model."""


@collect_app.command("causal")
def collect_causal(
    output: Annotated[
        str | None, typer.Option(help="Folder of the demonstrations; the same command continues.")
    ] = None,
    size: Annotated[
        Literal["small", "medium", "large", "xlarge"], typer.Option(help="1,000, 10,000, 100,000 or 500,000 attempts.")
    ] = "small",
    target: Annotated[int | None, typer.Option(min=1, help="Attempts, instead of --size.")] = None,
    difficulty: Annotated[str, typer.Option(help="difficulty_1 to difficulty_5, with commas, or all.")] = "all",
    target_accepted: Annotated[int | None, typer.Option(min=1, help="Accepted ones per level, then stop it.")] = None,
    max_attempts: Annotated[
        int | None, typer.Option(min=1, help="Per level, with --target-accepted; 5 times it.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; the number of cores.")] = None,
    serial: Annotated[bool, typer.Option("--serial", help="In this process, for a debugger.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    trajectory_length: Annotated[int, typer.Option(min=1, help="Interventions of one demonstration.")] = 5,
    rows_per_variable: Annotated[int, typer.Option(min=1, help="Rows under interventions known at first.")] = 10,
    mechanism: Annotated[Literal["linear", "tanh", "mixed"], typer.Option(help="How causes act.")] = "linear",
    min_accuracy: Annotated[float, typer.Option(min=0, max=1, help="Least Jaccard of an accepted one.")] = 0.7,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Without search, sparse prior and learned noise.")
    ] = False,
    checkpoint_interval: Annotated[
        int, typer.Option(min=1, help="Demonstrations a file; each is on disk at once.")
    ] = 5000,
    compress: Annotated[bool, typer.Option("--compress", help="Full files become .jsonl.zst.")] = False,
    memory_limit: Annotated[float, typer.Option(min=0.5, help="GB of address space for each worker.")] = 4.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one attempt.")] = 600.0,
    resume: Annotated[str | None, typer.Option(help="Continue this folder with its own settings.")] = None,
) -> None:
    """Collect demonstrations of PARENT_SCALE, an expert that experiments on causal models.

    Every attempt is kept, and says whether it is accepted. Whatever ends the command, the same one continues; the files
    are the same for any number of workers.

    \b
    Examples:
      atropos collect causal --size small --output demos
      atropos collect causal --target-accepted 200 --max-attempts 500 --difficulty difficulty_5 --output hard
      atropos collect causal --resume demos
      atropos status demos --watch
    """
    from atroposlib.environments.causal import collect as collecting
    from atroposlib.environments.causal.demonstration import DemonstrationConfig
    from atroposlib.environments.causal.scm import levels_of

    if importlib.util.find_spec("scipy") is None:
        raise DataError("the causal expert needs scipy: pip install 'atroposlib[causal]'")
    if (output is None) == (resume is None):
        raise typer.BadParameter("give --output, or --resume with the folder of an earlier one", param_hint="--output")
    if max_attempts is not None and target_accepted is None:
        raise typer.BadParameter("it needs --target-accepted", param_hint="--max-attempts")
    if resume is not None:
        config, plan = collecting.begun(expand_path(resume, what="--resume"))
    else:
        expert = {"steps": trajectory_length}
        if as_published:
            expert |= {"search": False, "sparse": False, "noise": "residual"}
        problem = {"seed": seed, "rows_per_variable": rows_per_variable, "mechanism": mechanism}
        config = DemonstrationConfig.model_validate(
            {"problem": problem, "expert": expert, "min_accuracy": min_accuracy}
        )
        plan = collecting.Plan(
            levels_of(difficulty),
            target or collecting.SIZES[size],
            target_accepted,
            max_attempts,
        )
    found = asyncio.run(
        collecting.collect(
            str(output or resume),
            config,
            plan,
            workers=workers or os.cpu_count() or 1,
            serial=serial,
            timeout_s=timeout,
            memory_mb=int(memory_limit * 1024),
            lines_per_file=checkpoint_interval,
            compressed=compress,
        )
    )
    print(found.line())
    if found.failed:
        raise DataError(f"{found.failed} attempts failed, see {found.failures.path}; the same command tries them again")
    if found.progress.state != "done":
        raise typer.Exit(75)  # work remains
    if short := found.levels.shortfalls():
        raise DataError(f"--max-attempts is reached: {'; '.join(short)}")


def main() -> None:
    run(collect_app, "atropos collect", log_level=logging.INFO)


if __name__ == "__main__":
    main()
