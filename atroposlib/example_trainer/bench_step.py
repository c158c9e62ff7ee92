"""The training part of one step, timed: the learner's, and TRL's `GRPOTrainer` on the same sequences.

    python -m atroposlib.example_trainer.bench_step --model MODEL_FOLDER --trl

Both sides train all weights in float32 with AdamW, with bfloat16 forward passes on a GPU unless `--dtype` says float32;
the same objective, no reference model, the same clipping of the gradient and one update per batch. Nothing is
generated: tokens, scores and log-probabilities are given. Tokens per second count every sequence in full, prompt and
response, whether or not a side computes a shared prompt once. CPU seconds are those of all threads; on a busy machine
they say more than seconds. The norm of the first gradient shows that both sides compute the same thing, in float32: in
bfloat16 what the responses of a group say about their prompt is rounded before it nearly cancels, unless they share it.
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from atroposlib.errors import AtroposError
from atroposlib.example_trainer.recipe import require_torch


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Model folder, or smollm2-135m.")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--group", type=int, default=8, help="Sequences of one prompt.")
    parser.add_argument("--prompt", type=int, default=200, help="Tokens.")
    parser.add_argument("--completion", type=int, default=48, help="Tokens.")
    parser.add_argument("--objective", default="dr_grpo", choices=["grpo", "dr_grpo"])
    parser.add_argument("--micro-batch-tokens", type=int, default=32768, help="Ours: padded tokens per forward pass.")
    parser.add_argument("--steps", type=int, default=10, help="Timed steps, after two that are not.")
    parser.add_argument("--device", default="auto", help="cuda, cpu; auto: a GPU when there is one.")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="Of forward passes.")
    parser.add_argument("--trl", action="store_true", help="Also TRL, which must be installed.")
    parser.add_argument(
        "--trl-batches", type=int, nargs="+", default=[16, 32, 64, 128], help="TRL: sequences per forward pass to try."
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        require_torch()
        from atroposlib.example_trainer.step_timing import measure

        print(measure(args))
    except AtroposError as error:
        print(f"bench_step: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
