"""Tokens trained per second, end to end: generation next to training, against a loop that alternates between the two.

    python -m benchmarks.bench_async --model MODEL_FOLDER --engine-gpus 0 --trainer-gpus 0
    python -m benchmarks.bench_async --model MODEL_FOLDER --engine-gpus 0,1 --trainer-gpus 1

Asynchronous is `atropos-grpo-run` with the recipe: while the trainer takes a step, the engine generates the next batch.
Alternating is the shortest loop that does the same work with the same engine, learner and update of weights: generate a
batch, train on it, hand over the weights, generate the next one. With `sync_from: gpu` an engine on another GPU must
see the trainer's as well, hence `0,1`; it computes on the first. Medians of the steps after `--skip`.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from atroposlib.environments.countdown_env import make_problem, prompt, right_answer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import AtroposError, LaunchError
from atroposlib.example_trainer.config import RunConfig, TrainingConfig
from atroposlib.example_trainer.data import TrainingRow
from atroposlib.example_trainer.learner import Learner
from atroposlib.example_trainer.recipe import check, read_recipe
from atroposlib.example_trainer.run_plan import model_names, trainer_settings
from atroposlib.example_trainer.weight_sync import make_sync
from benchmarks.learning_curve import running_engine

PARTS = ("wait", "train", "sync")


@dataclass(frozen=True)
class Step:
    """Seconds of one step: in all, waiting for rollouts, training and updating the engine; and its tokens."""

    seconds: float
    wait: float
    train: float
    sync: float
    tokens: int  # prompts and responses


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Model folder.")
    parser.add_argument("--recipe", type=Path, default=Path("configs/trainer/countdown.yaml"))
    parser.add_argument("--engine-gpus", default="0", help="As CUDA_VISIBLE_DEVICES.")
    parser.add_argument("--trainer-gpus", default="0", help="As CUDA_VISIBLE_DEVICES; alternating takes one.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=20, help="First steps that do not count.")
    parser.add_argument("--ways", nargs="+", default=["asynchronous", "alternating"], choices=list(_WAYS))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="Further fields of the recipe.")
    args = parser.parse_args(argv)
    changes = {key: json.loads(value) for key, _, value in (entry.partition("=") for entry in args.set)}
    print(
        "| way | engine on | trainer on | tokens/s | s a step | " + " | ".join(PARTS) + " |\n|" + "---|" * 8, flush=True
    )
    try:
        for way in args.ways:
            with tempfile.TemporaryDirectory() as folder:
                own = {"model_name": args.model, "training_steps": args.steps, "run_dir": folder, "save_final": False}
                config = check(RunConfig, {**read_recipe(args.recipe), **changes, **own})
                steps = _WAYS[way](config, Path(folder), args.engine_gpus, args.trainer_gpus)[args.skip :]
                print(row(way, args.engine_gpus, args.trainer_gpus, steps), flush=True)
    except AtroposError as error:
        print(f"bench_async: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def row(way: str, engine: str, trainer: str, steps: Sequence[Step]) -> str:
    """A line of the table."""
    rate = sum(step.tokens for step in steps) / sum(step.seconds for step in steps)
    medians = [statistics.median(getattr(step, name) for step in steps) for name in ("seconds", *PARTS)]
    cells = [way, engine, trainer, f"{rate:,.0f}", *(f"{value:.3f}" for value in medians)]
    return f"| {' | '.join(cells)} |"


def asynchronous(config: RunConfig, folder: Path, engine_gpus: str, trainer_gpus: str) -> list[Step]:
    """Return the steps of the whole system."""
    recipe, log = folder / "recipe.yaml", folder / "run.log"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    places = {"ATROPOS_ENGINE_GPUS": engine_gpus, "ATROPOS_TRAINER_GPUS": trainer_gpus}
    command = [sys.executable, "-m", "atroposlib.example_trainer.run", "--config", str(recipe)]
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=os.environ | places, check=False)
    if done.returncode != 0:
        raise LaunchError(f"the run ended with exit code {done.returncode}: {log.read_text()[-2000:]}")
    found = [json.loads(line) for line in (folder / "metrics" / "metrics.jsonl").read_text().splitlines()]
    return [
        Step(
            seconds=each["time/step_s"],
            tokens=round(each["time/tokens_per_s"] * each["time/step_s"]),
            **{part: each[f"time/{part}_s"] for part in PARTS},
        )
        for each in found
    ]


def alternating(config: RunConfig, folder: Path, engine_gpus: str, trainer_gpus: str) -> list[Step]:
    """Return the steps of a loop in which engine and trainer wait for each other."""
    os.environ["CUDA_VISIBLE_DEVICES"] = trainer_gpus.partition(",")[0]
    with running_engine(config, folder, os.environ | {"CUDA_VISIBLE_DEVICES": engine_gpus}) as url:
        settings: dict[str, Any] = trainer_settings(config, folder, [url], "http://127.0.0.1:9")
        return asyncio.run(_alternate(config, TrainingConfig.model_validate(settings), url, folder))


async def _alternate(config: RunConfig, training: TrainingConfig, url: str, folder: Path) -> list[Step]:
    learner, sync = Learner(training), make_sync(training, folder)
    tokenizer: Any = learner.policy.tokenizer
    settings = config.environment_config
    numbers, largest = settings.get("numbers", 3), settings.get("largest", 20)
    name, its_tokenizer = model_names(config)
    server = APIServerConfig(
        server_type="sglang", base_url=f"{url}/v1", model_name=name, tokenizer_name=its_tokenizer, api_key="x"
    )
    manager = ServerManager([server])

    async def group(number: int, place: int) -> list[TrainingRow]:
        item = make_problem(f"0/train/{number}", numbers, largest)
        ids = tokenizer.apply_chat_template(
            prompt(item, few_shot=settings.get("few_shot", 3), largest=largest),
            add_generation_prompt=True,
            return_dict=False,
        )
        ids, outputs, logprobs, _ = await manager.tokens_and_logprobs_completion(
            input_ids=ids, n=config.num_generations, max_tokens=config.max_completion_length, temperature=1.0
        )
        return [
            TrainingRow(
                tokens=np.array([*ids, *output]),
                trained=np.arange(len(ids) + len(output)) >= len(ids),
                infer_logp=np.array([0.0] * len(ids) + list(logp), np.float32),
                score=float(right_answer(tokenizer.decode(output), item) is not None),
                group=place,
                temperature=1.0,
            )
            for output, logp in zip(outputs, logprobs, strict=True)
        ]

    steps, groups = [], config.step_sequences // config.num_generations
    sync.push(learner.policy, 0)
    for number in range(config.training_steps):
        started = time.perf_counter()
        asked = (group(number * groups + place, place) for place in range(groups))
        rows = list(itertools.chain.from_iterable(await asyncio.gather(*asked)))
        generated = time.perf_counter()
        learner.train_on(rows)
        trained = time.perf_counter()
        sync.push(learner.policy, learner.step)
        done = time.perf_counter()
        tokens = sum(len(each.tokens) for each in rows)
        steps.append(Step(done - started, generated - started, trained - generated, done - trained, tokens))
    sync.close()
    await manager.close()
    return steps


_WAYS = {"asynchronous": asynchronous, "alternating": alternating}


if __name__ == "__main__":
    main()
