"""Find out which classes of an InternBootcamp checkout cannot be used, and write them down with the reason.

    python -m atroposlib.environments.intern_bootcamp.quarantine --path ~/InternBootcamp --output quarantine.json

Each class draws a few problems and judges a reply without an answer, in the sandbox. The file is for the setting
`quarantine_path`.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from atroposlib.environments.intern_bootcamp.bootcamp import Grading, tagged
from atroposlib.environments.intern_bootcamp.tasks import Task, checkout_classes, make_task
from atroposlib.errors import AtroposError
from atroposlib.paths import expand_path, write_text_atomic
from atroposlib.sandbox.workers import WorkerPool

NO_ANSWER = "I do not know."
GUESSES = tuple(map(tagged, ("0", "1", "2", "yes", "no", "True", "False", "A", "B", "[]", "{}", "None")))
GUESSED_SHARE = 0.4
"""A class is of no use where one of these replies is right for more of the problems."""
LENIENT = Grading(format_score=0.0, short_penalty=False, short_threshold=0, format_penalty=False)


async def fault_of(task: Task, problems: int) -> str | None:
    """Why a task cannot be used; None when `problems` problems came, are repeatable and have working verifiers."""
    rewarded: Counter[str] = Counter()
    try:
        for seed in range(problems):
            drawn = await task.draw(seed)
            if not drawn["prompt"].strip():
                return "the prompt is empty"
            if drawn != await task.draw(seed):
                return "the same seed gives different problems"
            for reply in (NO_ANSWER, *GUESSES):
                score = await task.verify(reply, drawn["identity"], drawn["identity_format"], LENIENT)
                rewarded[reply] += score >= 1
            if rewarded[NO_ANSWER]:
                return f"the reply {NO_ANSWER!r} is right"
    except AtroposError as error:
        return str(error)
    guess, times = max(rewarded.items(), key=lambda each: each[1])
    if times > problems * GUESSED_SHARE:
        return f"the constant reply {guess!r} is right for {times} of {problems} problems"
    return None


async def find_faults(checkout: str, sandbox: WorkerPool, problems: int) -> dict[str, str]:
    """Class name -> why it cannot be used, for every class that cannot."""
    names = list(checkout_classes(checkout))
    tasks = [make_task(name, {}, sandbox, checkout) for name in names]
    reasons = await asyncio.gather(*(fault_of(task, problems) for task in tasks))
    return {name: reason for name, reason in zip(names, reasons, strict=True) if reason is not None}


def main(
    path: Annotated[str, typer.Option(help="Folder of the checkout.")],
    output: Annotated[str, typer.Option(help="File to write.")] = "quarantine.json",
    problems: Annotated[
        int,
        typer.Option(min=1, help="Problems drawn from each class."),
    ] = 5,
    timeout_s: Annotated[float, typer.Option(help="Seconds for one call.")] = 10,
    memory_mb: Annotated[int, typer.Option(help="Address space of a worker, in MiB.")] = 2048,
    workers: Annotated[int, typer.Option(min=1, help="Processes at the same time.")] = 2,
) -> None:
    """Write the quarantine list of a checkout.

    Example:

      python -m atroposlib.environments.intern_bootcamp.quarantine --path ~/InternBootcamp --output quarantine.json
    """

    async def search() -> tuple[int, dict[str, str]]:
        checkout = str(expand_path(path, what="--path").absolute())
        sandbox = WorkerPool(workers=workers, timeout_s=timeout_s, memory_mb=memory_mb)
        try:
            return len(checkout_classes(checkout)), await find_faults(checkout, sandbox, problems)
        finally:
            sandbox.close()

    try:
        target = expand_path(output, what="--output")
        count, faults = asyncio.run(search())
        write_text_atomic(Path(target), json.dumps(faults, indent=1, ensure_ascii=False) + "\n")
    except AtroposError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{len(faults)} of {count} classes are in quarantine: {target}")


if __name__ == "__main__":
    typer.run(main)
