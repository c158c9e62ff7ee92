"""Learning curves on Countdown: objectives x seeds, each evaluated before and after, as table and picture.

    python -m benchmarks.learning_curve --model MODEL_FOLDER --out runs/curve --steps 200

Per problem k = 8 responses are sampled: mean@8 is the share that is right, pass@8 the share of problems with at least
one right, distinct@8 the mean number of *different* right expressions per problem. A finished run is not repeated, so
the same command goes on; several commands with other seeds or objectives may share the folder, one for each GPU, and
the one that names them all draws the table and the picture.
"""

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from atroposlib.environments.countdown_env import Countdown, make_problem, prompt, right_answer
from atroposlib.errors import AtroposError, LaunchError
from atroposlib.example_trainer.exports import CURRENT_GGUF, exports_folder
from atroposlib.example_trainer.recipe import check, read_recipe, require_torch
from atroposlib.example_trainer.run import run
from atroposlib.example_trainer.run_config import RunConfig
from atroposlib.example_trainer.run_plan import engine_command
from atroposlib.launch.services import free_ports

logger = logging.getLogger(__name__)

OBJECTIVES: dict[str, dict[str, Any]] = {
    "dr_grpo": {"objective": "dr_grpo"},
    "grpo": {"objective": "grpo"},
    "xdr_grpo tau=0.05": {"objective": "xdr_grpo", "maxent_tau": 0.05},
    "xdr_grpo tau=0.25": {"objective": "xdr_grpo", "maxent_tau": 0.25},
    "maxent tau=0.2": {"objective": "maxent", "maxent_tau": 0.2},
}
SAMPLES = 8


@dataclass(frozen=True)
class Scores:
    """Of one set of weights."""

    mean: float
    passed: float
    distinct: float


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Model folder.")
    parser.add_argument("--out", required=True, type=Path, help="Results and runs; the same folder goes on.")
    parser.add_argument("--recipe", type=Path, default=Path("configs/trainer/countdown.yaml"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--objectives", nargs="+", default=["dr_grpo", "xdr_grpo tau=0.05"], choices=list(OBJECTIVES))
    parser.add_argument("--problems", type=int, default=128, help="Held-out problems of an evaluation.")
    parser.add_argument("--engine", default="sglang", choices=["sglang", "embedded"])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="Further fields of the recipe.")
    args = parser.parse_args(argv)
    try:
        compare(args)
    except AtroposError as error:
        print(f"learning_curve: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def compare(args: argparse.Namespace) -> None:
    """Train and evaluate what the command's flags ask for; print and write the table, draw the picture."""
    require_torch()
    args.out.mkdir(parents=True, exist_ok=True)
    changes = {key: json.loads(value) for key, _, value in (entry.partition("=") for entry in args.set)}
    base = {**read_recipe(args.recipe), "model_name": args.model, "training_steps": args.steps, "engine": args.engine}
    base |= changes
    results: dict[str, list[Scores]] = {}
    for name in args.objectives:
        for seed in args.seeds:
            folder = args.out / f"{name.replace(' ', '_').replace('=', '')}_seed{seed}"
            fields = {**base, **OBJECTIVES[name], "seed": seed, "run_dir": str(folder / "run")}
            fields["environment_config"] = {**base["environment_config"], "seed": seed}
            config = check(RunConfig, fields)
            results.setdefault(name, []).append(_train_and_score(folder, config, args.problems))
    before = _scores(args.out / "before", check(RunConfig, base), args.model, args.problems)
    print(table(before, results))
    (args.out / "table.md").write_text(table(before, results) + "\n", encoding="utf-8")
    plot(args.out, args.objectives, args.seeds)


def table(before: Scores, results: dict[str, list[Scores]]) -> str:
    """Markdown: mean over seeds, and the spread (half the range) where there are several."""
    lines = ["| objective | seeds | mean@8 | pass@8 | distinct@8 |", "|---|---|---|---|---|"]
    lines.append(f"| before | - | {before.mean:.3f} | {before.passed:.3f} | {before.distinct:.3f} |")
    for name, scores in results.items():
        columns = [[s.mean for s in scores], [s.passed for s in scores], [s.distinct for s in scores]]
        cells = [f"{statistics.fmean(c):.3f} ± {(max(c) - min(c)) / 2:.3f}" for c in columns]
        lines.append(f"| {name} | {len(scores)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(out: Path, objectives: Sequence[str], seeds: Sequence[int]) -> None:
    """`curve.png`: reward per step, mean over seeds, smoothed over ten steps."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for name in objectives:
        folders = [out / f"{name.replace(' ', '_').replace('=', '')}_seed{seed}" for seed in seeds]
        for axis, key in zip(axes, ("batch/reward_mean", "train/entropy"), strict=True):
            curves = [_smooth(_series(folder, key)) for folder in folders]
            mean = [statistics.fmean(values) for values in zip(*curves, strict=False)]
            axis.plot(range(1, len(mean) + 1), mean, label=name)
    for axis, title in zip(axes, ("reward", "entropy (nats per token)"), strict=True):
        axis.set_xlabel("step")
        axis.set_title(title)
        axis.legend()
    figure.tight_layout()
    figure.savefig(out / "curve.png", dpi=120)


def _train_and_score(folder: Path, config: RunConfig, problems: int) -> Scores:
    final = Path(config.run_dir) / "checkpoints" / "final"
    if not final.exists():
        code = run(config)
        if code != 0:
            raise LaunchError(f"run {config.run_dir} ended with exit code {code}; read its logs folder")
    newest = (exports_folder(final.parent) / CURRENT_GGUF).resolve()
    model = newest if config.engine == "embedded" else final
    return _scores(folder / "after", config, str(model), problems)


def _scores(folder: Path, config: RunConfig, model: str, problems: int) -> Scores:
    """Evaluate once, also when several commands ask at the same time; later calls read the result."""
    result = folder / "scores.json"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            with _engine(config.model_copy(update={"model_name": model}), folder) as url:
                scores = asyncio.run(_evaluate(url, config, problems, folder))
            result.write_text(json.dumps(vars(scores), indent=1), encoding="utf-8")
    return Scores(**json.loads(result.read_text(encoding="utf-8")))


async def _evaluate(url: str, config: RunConfig, problems: int, folder: Path) -> Scores:
    from atroposlib.example_trainer.policy import load_tokenizer, model_folder

    tokenizer = load_tokenizer(model_folder(config.model_name))
    settings = config.environment_config
    numbers, largest = settings.get("numbers", 3), settings.get("largest", 20)
    items = [make_problem(f"test/{i}", numbers, largest) for i in range(problems)]
    limit = asyncio.Semaphore(64)

    async def answers(item: Countdown) -> list[str]:
        ids = tokenizer.apply_chat_template(
            prompt(item, few_shot=settings.get("few_shot", 3), largest=largest),  # pyright: ignore[reportArgumentType]
            add_generation_prompt=True,
            return_dict=False,
        )
        sampling = {"temperature": 1.0, "max_new_tokens": config.max_completion_length, "n": SAMPLES}
        async with (
            limit,
            session.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling}) as reply,
        ):
            reply.raise_for_status()
            return [choice["text"] for choice in await reply.json()]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        texts = await asyncio.gather(*(answers(item) for item in items))
    lines = [json.dumps({**item, "texts": found}) for item, found in zip(items, texts, strict=True)]
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return score([[right_answer(text, item) for text in found] for item, found in zip(items, texts, strict=True)])


def score(answers: Sequence[Sequence[str | None]]) -> Scores:
    """Scores of right answers (None: wrong) per problem.

    >>> score([["1+2", None, "2+1"], [None, None, None]])
    Scores(mean=0.3333333333333333, passed=0.5, distinct=1.0)
    """
    right = [[answer for answer in row if answer is not None] for row in answers]
    return Scores(
        mean=sum(map(len, right)) / sum(map(len, answers)),
        passed=statistics.fmean(bool(row) for row in right),
        distinct=statistics.fmean(len(set(row)) for row in right),
    )


@contextlib.contextmanager
def _engine(config: RunConfig, folder: Path) -> Iterator[str]:
    """An engine for one evaluation, ended afterwards."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with (folder / "engine.log").open("ab") as log:
        process = subprocess.Popen(engine_command(config, port), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + config.engine_ready_s
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise LaunchError(f"the engine did not get ready; read {folder / 'engine.log'}")
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health_generate", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def _metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "run" / "metrics" / "metrics.jsonl"
    by_step = {line["step"]: line for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    return [by_step[step] for step in sorted(by_step)]


def _series(folder: Path, key: str) -> list[float]:
    """One metric per step; a step that did not report it (no group had a signal) repeats the one before."""
    values: list[float] = []
    for line in _metrics(folder):
        values.append(line.get(key, values[-1] if values else 0.0))
    return values


def _smooth(values: Sequence[float], width: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    main()
