"""`atropos-grpo`: train a model on the batches of a running trajectory API.

    atropos-grpo --config configs/trainer/grpo.yaml --lr 2e-6

Exit codes: 0 done, 1 failed with a sentence, 2 wrong usage, 75 stopped by a signal (the same command goes on).
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from atroposlib.errors import AtroposError, ConfigError
from example_trainer.config import TrainingConfig
from example_trainer.recipe import build, parser_of, require_torch

_WORK_REMAINS = 75


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for noisy in ("httpx", "gguf"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    _quiet_threads()
    try:
        config = config_from_args(parse_args(argv))
    except ConfigError as error:
        print(f"atropos-grpo: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        require_torch()
        from example_trainer.loop import train

        result = train(config)
    except AtroposError as error:
        print(f"atropos-grpo: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f"step {result.step}; checkpoint {result.checkpoint}")
    raise SystemExit(0 if result.finished else _WORK_REMAINS)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags as given; None where a flag was not.

    Raises:
        ConfigError: an unknown flag, with the nearest known one.
    """
    return parser_of(TrainingConfig, "Train a model on the batches of a trajectory API.").parse_args(argv)


def config_from_args(args: argparse.Namespace) -> TrainingConfig:
    """Recipe, environment variables and flags as one checked config."""
    return build(TrainingConfig, vars(args), os.environ)


def _quiet_threads() -> None:
    """OpenMP threads that wait must not spin: beside an engine on the same cores that costs ten times the speed."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


if __name__ == "__main__":
    main()
