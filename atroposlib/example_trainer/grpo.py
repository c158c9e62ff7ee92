"""`atropos-grpo`: train a model on the batches of a running trajectory API, next to engines that run elsewhere.

    atropos-grpo --model-name Qwen/Qwen3-0.6B --weight-sync sglang --engine-urls http://localhost:9000

A recipe (`--config`) holds fields of the trainer only; those in configs/trainer also start engine, API and environment,
and are for `atropos-grpo-run`.

Exit codes: 0 done, 1 failed with a sentence, 2 wrong usage, 75 stopped by a signal (the same command resumes).
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from atroposlib import calm_log
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.example_trainer.config import RunConfig, TrainingConfig
from atroposlib.example_trainer.recipe import build, parser_of, read_recipe, require_torch
from atroposlib.paths import expand_path
from atroposlib.rollouts.stop import EXIT_WORK_REMAINS
from atroposlib.system_limits import told_limits

_EXAMPLES = """\
examples:
  atropos-grpo --model-name Qwen/Qwen3-0.6B --atropos-url http://node7:8000 \\
      --weight-sync sglang --engine-urls http://node8:9000 http://node9:9000
  atropos-grpo --config my_trainer.yaml --lr 2e-6 --save-path runs/second
  accelerate launch --num_processes 4 -m atroposlib.example_trainer.grpo --config my_trainer.yaml
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    calm_log.begin(logging.INFO)
    for noisy in ("httpx", "gguf"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    _quiet_threads()
    try:
        config = config_from_args(parse_args(argv))
        require_torch()
        from atroposlib.example_trainer.loop import train

        with told_limits():
            result = train(config)
    except AtroposError as error:
        print(f"atropos-grpo: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(f"step {result.step}; checkpoint {result.checkpoint}")
    raise SystemExit(0 if result.finished else EXIT_WORK_REMAINS)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags as given; None where a flag was not.

    Raises:
        ConfigError: an unknown flag, with the nearest known one.
    """
    parser = parser_of(TrainingConfig, "Train a model on the batches of a trajectory API.", _EXAMPLES)
    return parser.parse_args(argv)


def config_from_args(args: argparse.Namespace) -> TrainingConfig:
    """Recipe, environment variables and flags as one checked config.

    Raises:
        ConfigError: a value is wrong, a key unknown, or the recipe is one of `atropos-grpo-run`.
    """
    if args.config:
        _refuse_a_runs_recipe(args.config)
    return build(TrainingConfig, vars(args), os.environ)


def _refuse_a_runs_recipe(name: str) -> None:
    only_a_runs = RunConfig.model_fields.keys() - TrainingConfig.model_fields.keys()
    found = sorted(only_a_runs & read_recipe(expand_path(name, what="--config")).keys())
    if found:
        raise ConfigError(
            f"{name} is a recipe of atropos-grpo-run, which starts engine and environment as well: it has "
            f"{', '.join(found)}; run atropos-grpo-run --config {name}, or leave these keys out"
        )


def _quiet_threads() -> None:
    """OpenMP threads that wait must not spin: next to an engine on the same cores that costs ten times the speed."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


if __name__ == "__main__":
    main()
