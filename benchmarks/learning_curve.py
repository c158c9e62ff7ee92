"""Learning curves on Countdown: objectives x seeds, evaluated as they learn, as table and picture.

    python -m benchmarks.learning_curve --model MODEL_FOLDER --out runs/curve --steps 200

Before the first step and every `--evaluate-every` steps, k = 8 responses to each of `--problems` held-out problems of
the seed are sampled: mean@8 is the share that is right, pass@8 the share of problems with at least one right,
distinct@8 the mean number of *different* right expressions per problem. A run that has its last evaluation is not
repeated, so the same command resumes; several commands with other seeds or objectives may share the folder, and
the one that names them all draws table and picture.
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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import yaml

from atroposlib.environments.countdown_env import Countdown, make_problem, prompt, right_answer
from atroposlib.errors import AtroposError, LaunchError
from atroposlib.example_trainer.config import RunConfig
from atroposlib.example_trainer.recipe import check, read_recipe, require_torch
from atroposlib.example_trainer.run_plan import engine_command
from atroposlib.launch.services import free_ports
from atroposlib.status.training import EVALUATIONS, read_evaluations, read_training

logger = logging.getLogger(__name__)

OBJECTIVES: dict[str, dict[str, Any]] = {
    "dr_grpo": {"objective": "dr_grpo"},
    "dr_grpo clip-higher": {"objective": "dr_grpo", "clip_eps": 0.2, "clip_eps_high": 0.28},
    "dr_grpo beta=0.02": {"objective": "dr_grpo", "init_kl_coeff": 0.02},
    "grpo": {"objective": "grpo"},
    "xdr_grpo tau=0.05": {"objective": "xdr_grpo", "maxent_tau": 0.05},
    "xdr_grpo tau=0.25": {"objective": "xdr_grpo", "maxent_tau": 0.25},
    "maxent tau=0.2": {"objective": "maxent", "maxent_tau": 0.2},
}
SAMPLES = 8
SHOWN = ("mean@8", "pass@8", "distinct@8")
AFTER_LAST_STEPS = 10
"""Steps that a run takes after its last evaluation, which needs the engine for a few seconds more."""
REPORT_EVERY_S = 30.0


@dataclass(frozen=True)
class Scores:
    """Of one set of weights."""

    mean: float
    passed: float
    distinct: float


@dataclass(frozen=True)
class Training:
    """One objective with one seed. `folder` holds all of it."""

    objective: str
    seed: int
    folder: Path
    every: int  # steps between evaluations

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def curve(self) -> list[tuple[int, Scores]]:
        """Return what each evaluation so far gave, by the step that it was meant for; it may begin one later."""
        return [
            (step - step % self.every, Scores(*(metrics[f"eval/{name}"] for name in SHOWN)))
            for step, metrics in read_evaluations(self.run_dir / EVALUATIONS)
        ]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Model folder.")
    parser.add_argument("--out", required=True, type=Path, help="Results and runs; the same folder resumes.")
    parser.add_argument("--recipe", type=Path, default=Path("configs/trainer/countdown.yaml"))
    parser.add_argument("--steps", type=int, default=200, help="The last evaluation comes after these.")
    parser.add_argument("--evaluate-every", type=int, default=25, help="Steps.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--objectives", nargs="+", default=["dr_grpo", "xdr_grpo tau=0.05"], choices=list(OBJECTIVES))
    parser.add_argument("--problems", type=int, default=256, help="Held-out problems of an evaluation.")
    parser.add_argument("--at-once", type=int, default=1, help="Runs at the same time, each with an engine of its own.")
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
    trainings = [
        Training(name, seed, args.out / f"{name.replace(' ', '_').replace('=', '')}_seed{seed}", args.evaluate_every)
        for name in args.objectives
        for seed in args.seeds
    ]
    with ThreadPoolExecutor(args.at_once + 1) as pool:
        first = pool.submit(_scores_before, args)
        for done in [pool.submit(_train, args, training) for training in trainings]:
            done.result()
        before = first.result()
    found = table(before, _last(trainings))
    print(found)
    (args.out / "table.md").write_text(found + "\n", encoding="utf-8")
    plot(args.out, before, trainings)


def _settings(args: argparse.Namespace, **own: Any) -> RunConfig:
    changes = {key: json.loads(value) for key, _, value in (entry.partition("=") for entry in args.set)}
    recipe = read_recipe(args.recipe)
    evaluation = {
        "steps_per_eval": args.evaluate_every,
        "eval_problems": args.problems,
        "eval_samples": SAMPLES,
        "eval_handling": "STOP_TRAIN",
    }
    fields = {**recipe, "model_name": args.model, "engine": args.engine, **changes, **own}
    fields["training_steps"] = args.steps + AFTER_LAST_STEPS
    fields["environment_config"] = {**recipe["environment_config"], **evaluation, "seed": fields.get("seed", 0)}
    return check(RunConfig, fields)


def _train(args: argparse.Namespace, training: Training) -> None:
    """Run it to its end, unless it was; LaunchError when it fails."""
    own = OBJECTIVES[training.objective]
    config = _settings(args, run_dir=str(training.run_dir), seed=training.seed, **own)
    training.folder.mkdir(parents=True, exist_ok=True)
    recipe, log = training.folder / "recipe.yaml", training.folder / "run.log"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    if (curve := training.curve()) and curve[-1][0] >= args.steps:
        return
    command = [sys.executable, "-m", "atroposlib.example_trainer.run", "--config", str(recipe)]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REPORT_EVERY_S)
            newest = read_training(training.run_dir / "metrics", config.training_steps, only_last=True)
            logger.info("%s, seed %d: %s", training.objective, training.seed, newest.line())
            if process.returncode is not None:
                break
    finally:
        process.terminate()
        process.wait()
    if process.returncode != 0:
        raise LaunchError(f"run {training.run_dir} ended with exit code {process.returncode}; read {log}")


def _last(trainings: Sequence[Training]) -> dict[str, list[Scores]]:
    """Return what each objective's runs gave at the last evaluation that all runs have."""
    curves = [dict(training.curve()) for training in trainings]
    step = max(set.intersection(*map(set, curves)))
    found: dict[str, list[Scores]] = {}
    for training, curve in zip(trainings, curves, strict=True):
        found.setdefault(training.objective, []).append(curve[step])
    return found


def table(before: Scores, results: dict[str, list[Scores]]) -> str:
    """Markdown: mean over seeds, and the spread (half the range) where there are several."""
    lines = ["| objective | seeds | mean@8 | pass@8 | distinct@8 |", "|---|---|---|---|---|"]
    lines.append(f"| before | - | {before.mean:.3f} | {before.passed:.3f} | {before.distinct:.3f} |")
    for name, scores in results.items():
        columns = [[s.mean for s in scores], [s.passed for s in scores], [s.distinct for s in scores]]
        cells = [f"{statistics.fmean(c):.3f} ± {(max(c) - min(c)) / 2:.3f}" for c in columns]
        lines.append(f"| {name} | {len(scores)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(out: Path, before: Scores, trainings: Sequence[Training]) -> None:
    """`curve.png`: evaluations, reward and entropy over steps; the mean over seeds, shaded from lowest to highest.

    Evaluations are left out unless every run has some.
    """
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    shown = dict(zip(SHOWN, ("mean", "passed", "distinct"), strict=True)) if all(t.curve() for t in trainings) else {}
    logged = {"reward": "batch/reward_mean", "entropy (nats per token)": "train/entropy"}
    figure, axes = pyplot.subplots(1, len(shown) + 2, figsize=(4.5 * (len(shown) + 2), 4.2))
    for objective in dict.fromkeys(training.objective for training in trainings):
        own = [training for training in trainings if training.objective == objective]
        curves = [[(0, before), *training.curve()] for training in own]
        for axis, part in zip(axes, shown.values(), strict=False):
            _band(axis, [[(step, getattr(scores, part)) for step, scores in curve] for curve in curves], objective)
        for axis, key in zip(axes[len(shown) :], logged.values(), strict=True):
            _band(axis, [list(enumerate(_smooth(_series(training, key)), 1)) for training in own], objective)
    for axis, title in zip(axes, (*shown, *logged), strict=True):
        axis.set_xlabel("step")
        axis.set_title(title)
        axis.set_ylim(bottom=0)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(out / "curve.png", dpi=80)


def _band(axis: Any, curves: Sequence[Sequence[tuple[int, float]]], label: str) -> None:
    """Draw the mean of curves at the steps that all of them have, and the range behind it."""
    steps = [step for step, _ in min(curves, key=len)]
    values = list(zip(*([value for _, value in curve] for curve in curves), strict=False))
    (line,) = axis.plot(steps, [statistics.fmean(row) for row in values], label=label)
    axis.fill_between(steps, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.15)


def _scores_before(args: argparse.Namespace) -> Scores:
    """Evaluate the model as it is, once, also when several commands ask at the same time."""
    folder = args.out / "before"
    result = folder / "scores.json"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            config = _settings(args, run_dir=str(folder))
            with running_engine(config, folder) as url:
                scores = asyncio.run(_evaluate(url, config, args.seeds, args.problems, folder))
            result.write_text(json.dumps(vars(scores), indent=1), encoding="utf-8")
    return Scores(**json.loads(result.read_text(encoding="utf-8")))


async def _evaluate(url: str, config: RunConfig, seeds: Sequence[int], problems: int, folder: Path) -> Scores:
    from atroposlib.example_trainer.policy import load_tokenizer, model_folder

    tokenizer = load_tokenizer(model_folder(config.model_name))
    settings = config.environment_config
    numbers, largest = settings.get("numbers", 3), settings.get("largest", 20)
    items = [make_problem(f"{seed}/test/{i}", numbers, largest) for seed in seeds for i in range(problems)]
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
def running_engine(config: RunConfig, folder: Path, environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start the run's engine, give its address, and end it afterwards; of an external engine only the address.

    Args:
        environ: of the engine; None: this process's own.
    """
    if config.engine == "external":
        yield config.engine_urls[0]
        return
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with (folder / "engine.log").open("ab") as log:
        process = subprocess.Popen(
            engine_command(config, port), stdout=log, stderr=log, start_new_session=True, env=environ
        )
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


def _series(training: Training, key: str) -> list[float]:
    """One metric per step; a step that did not report it (no group had a signal) repeats the one before."""
    values: list[float] = []
    for point in read_training(training.run_dir / "metrics", 0).points:
        values.append(point.get(key, values[-1] if values else 0.0))
    return values


def _smooth(values: Sequence[float], width: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    main()
