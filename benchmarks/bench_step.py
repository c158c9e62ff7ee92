"""The training part of one step, timed: the learner's, and TRL's `GRPOTrainer` on the same sequences.

    python -m benchmarks.bench_step --model MODEL_FOLDER --trl
    torchrun --nproc_per_node 2 -m benchmarks.bench_step --model MODEL_FOLDER    # ours, on two GPUs

Both sides train all weights in float32 with AdamW, with bfloat16 forward passes on a GPU unless `--dtype` says float32;
the same objective, no reference model, the same clipping of the gradient and one update per batch. Nothing is
generated: tokens, scores and log-probabilities are given. Tokens per second count every sequence in full, prompt and
response, whether or not a side computes a shared prompt once. CPU seconds are those of all threads; on a busy machine
they say more than seconds. The norm of the first gradient shows that both sides compute the same thing, in float32: in
bfloat16 what the responses of a group say about their prompt is rounded before it nearly cancels, unless they share it.

Of TRL (written against 1.16) is timed what lies between the trainer's own `on_step_begin` and `on_step_end`, less the
time in which it prepares its inputs (responses, rewards, advantages), which are given.
"""

import argparse
import gc
import importlib.metadata
import itertools
import logging
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.data import TrainingRow
from atroposlib.example_trainer.exports import model_folder
from atroposlib.example_trainer.learner import Learner
from atroposlib.example_trainer.policy import pick_device, pick_dtype

PARTS = ("forward", "backward", "optimizer")
WARM_UP = 6
"""Steps that are not timed: kernels are compiled and chosen, for a while in other threads, and memory is claimed."""
_PACKAGES = ("torch", "transformers", "accelerate", "trl", "datasets")
_GIB = 2**30


@dataclass(frozen=True)
class Work:
    """What both sides do."""

    folder: Path | str  # the model
    device: torch.device
    sequences: int
    group: int  # sequences of one prompt
    prompt: int  # tokens
    completion: int  # tokens
    steps: int  # timed ones
    objective: str  # grpo or dr_grpo
    dtype: str = "auto"  # of the forward passes
    compiled: bool | None = None  # ours; None: as by default

    @property
    def tokens(self) -> int:
        """Of one step, every sequence in full."""
        return self.sequences * (self.prompt + self.completion)


@dataclass
class Timing:
    """What one side took. Seconds per step, in order."""

    side: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    norms: list[float] = field(default_factory=list)  # of each step's gradient, before clipping
    peak_bytes: int = 0

    def add(self, seconds: float, cpu_seconds: float, parts: dict[str, float]) -> None:
        """Note one step."""
        self.seconds.append(seconds)
        self.cpu_seconds.append(cpu_seconds)
        for part in PARTS:
            self.parts[part].append(parts.get(part, 0.0))

    def row(self, work: Work) -> str:
        """A line of the table: medians over the steps after the warm-up."""
        step, cpu = statistics.median(self.seconds[WARM_UP:]), statistics.median(self.cpu_seconds[WARM_UP:])
        parts = [f"{statistics.median(self.parts[part][WARM_UP:]):.3f}" for part in PARTS]
        cells = [f"{step:.3f}", f"{cpu:.3f}", f"{work.tokens / step:,.0f}", *parts, f"{self.peak_bytes / _GIB:.2f}"]
        return f"| {self.side} | {' | '.join(cells)} | {self.norms[0]:.5g} |"


def make_rows(work: Work, vocabulary: int, seed: int = 0) -> list[TrainingRow]:
    """Random ids and scores; the responses of a group share their prompt, and no score equals its group's mean."""
    random = np.random.default_rng(seed)
    rows: list[TrainingRow] = []
    for number in range(work.sequences):
        new_group = number % work.group == 0
        prompt = random.integers(vocabulary, size=work.prompt) if new_group else rows[-1].tokens[: work.prompt]
        tokens = np.concatenate([prompt, random.integers(vocabulary, size=work.completion)])
        trained = np.arange(len(tokens)) >= work.prompt
        logp = np.where(trained, random.normal(-2, 0.5, len(tokens)), 0.0).astype(np.float32)
        rows.append(TrainingRow(tokens, trained, logp, float(random.normal()), number // work.group, temperature=1.0))
    return rows


def time_ours(work: Work, rows: Sequence[TrainingRow], micro_batch_tokens: int, *, share_prompts: bool) -> Timing:
    """The learner's step on prepared rows."""
    learner = _learner(work, micro_batch_tokens, share_prompts=share_prompts)
    timing = Timing("ours" if share_prompts else "ours, each prompt computed every time")
    start_peak(work.device)
    for _ in range(WARM_UP + work.steps):
        started, cpu_started = time.perf_counter(), time.process_time()
        metrics = learner.train_on(rows)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        timing.add(seconds, cpu_seconds, {part: metrics[f"time/{part}_s"] for part in PARTS})
        timing.norms.append(metrics["train/grad_norm"])
    timing.peak_bytes = peak_bytes(work.device)
    return timing


def _learner(work: Work, micro_batch_tokens: int, *, share_prompts: bool) -> Learner:
    return Learner(
        TrainingConfig.model_validate(
            {
                "model_name": str(work.folder),
                "device": str(work.device),
                "dtype": work.dtype,
                "compile_layers": work.compiled,
                "objective": work.objective,
                "std_ddof": 1,  # TRL's
                "old_logprobs": "trainer",
                "batch_size": work.sequences,
                "gradient_accumulation_steps": 1,
                "seq_len": work.prompt + work.completion,
                "max_completion_length": work.completion,
                "micro_batch_tokens": micro_batch_tokens,
                "share_prompts": share_prompts,
            }
        )
    )


def gradient_errors(work: Work, rows: Sequence[TrainingRow], micro_batch_tokens: int) -> str:
    """Markdown: the first gradient of each way to compute it, against that of float32 with each row alone.

    The error is |g - g32| / |g32| over all weights, before clipping changes the length of either.
    """
    truth = _first_gradient(replace(work, dtype="float32", compiled=False), rows, micro_batch_tokens, share=False)
    size = torch.linalg.vector_norm(truth)
    lines = ["| first gradient of | norm | relative error | cosine |", "|---|---|---|---|"]
    for dtype, compiled, share in itertools.product(("float32", "bfloat16"), (False, True), (False, True)):
        found = _first_gradient(replace(work, dtype=dtype, compiled=compiled), rows, micro_batch_tokens, share=share)
        name = f"{dtype}{', compiled' if compiled else ''}{', prompts shared' if share else ''}"
        norm, error = torch.linalg.vector_norm(found), torch.linalg.vector_norm(found - truth) / size
        lines.append(f"| {name} | {norm:.5g} | {error:.2g} | {torch.dot(found, truth) / (norm * size):.5f} |")
    return "\n".join(lines)


def _first_gradient(work: Work, rows: Sequence[TrainingRow], micro_batch_tokens: int, *, share: bool) -> torch.Tensor:
    """[weights] the direction that the optimizer is given, times the norm that it had before clipping."""
    learner = _learner(work, micro_batch_tokens, share_prompts=share)
    seen: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten() for p in learner.policy.trainable if p.grad is not None]))
    )
    norm = learner.train_on(rows)["train/grad_norm"]
    return seen[0] * max(1.0, norm / learner.config.max_grad_norm)


def start_peak(device: torch.device) -> None:
    """Forget earlier peaks. On a CPU this needs Linux; elsewhere the peak is that of the whole process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Most memory since `start_peak`: what torch allocated on the GPU, or what the process held in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(work: Work, timings: Sequence[Timing]) -> str:
    """Markdown, and what it was measured with."""
    memory = "GPU" if work.device.type == "cuda" else "RAM"
    name = torch.cuda.get_device_name(work.device) if work.device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    lines = [
        f"{work.sequences} sequences in groups of {work.group}, {work.prompt} + {work.completion} tokens, "
        f"{work.objective}, {pick_dtype(work.dtype, work.device)}, {work.steps} steps, {_ranks()} x {name}",
        f"| side | s a step | CPU s | tokens/s | {' | '.join(PARTS)} | peak {memory} GiB | first gradient norm |",
        "|---|---|---|---|---|---|---|---|---|",
        *(timing.row(work) for timing in timings),
        f"gradient norms of all steps, {timings[0].side}: {' '.join(f'{norm:.7g}' for norm in timings[0].norms)}",
        f"python {sys.version.split()[0]}, " + ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
    ]
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> str:
    """The table of what the command's flags ask for."""
    if args.sequences % args.group:
        raise ConfigError(f"--sequences {args.sequences} is not a multiple of --group {args.group}; change one")
    names = ("sequences", "group", "prompt", "completion", "steps", "objective", "dtype", "compiled")
    work = Work(model_folder(args.model), pick_device(args.device), **{name: getattr(args, name) for name in names})
    rows = make_rows(work, _vocabulary(work.folder))
    if args.gradients:
        return gradient_errors(work, rows, args.micro_batch_tokens)
    timings: list[Timing] = []
    for timing in _sides(args, work, rows):
        print(timing.row(work), file=sys.stderr, flush=True)
        timings.append(timing)
    return table(work, timings)


def _sides(args: argparse.Namespace, work: Work, rows: Sequence[TrainingRow]) -> Iterator[Timing]:
    """One after the other, each gone from memory before the next."""
    for share in (True, False):
        yield time_ours(work, rows, args.micro_batch_tokens, share_prompts=share)
    if args.trl:
        for batch in args.trl_batches:
            timing = time_trl(work, rows, batch) if args.sequences % batch == 0 else None
            if timing is not None:
                yield timing


def _vocabulary(folder: Path | str) -> int:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder).vocab_size


def _ranks() -> int:
    """Processes that share a step, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


_LOSSES = {"grpo": ("grpo", "group"), "dr_grpo": ("dr_grpo", "none")}
"""TRL's loss_type and scale_rewards of an objective."""


def time_trl(work: Work, rows: Sequence[TrainingRow], batch: int) -> Timing | None:
    """TRL's step with `batch` sequences per forward pass; None, with a line, when they do not fit into memory.

    Raises:
        ConfigError: TRL or a package it needs is not installed.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(work, rows, batch, folder)
        watch = _Watch(work, batch)
        watch.attach(trainer)
        start_peak(work.device)
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            print(f"TRL with {batch} sequences per forward pass does not fit into memory")
            return None
        watch.timing.peak_bytes = peak_bytes(work.device)
    return watch.timing


def _trainer(work: Work, rows: Sequence[TrainingRow], batch: int, folder: str) -> Any:
    try:
        from datasets import Dataset
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer
    except ImportError as error:
        raise ConfigError(f"--trl needs TRL, which does not import: {error}; pip install trl==1.16.0") from error
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from transformers.utils.logging import disable_progress_bar

    loss_type, scale_rewards = _LOSSES[work.objective]
    accumulation = work.sequences // batch
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_iterations=1,
        num_generations=work.group,
        max_completion_length=work.completion,
        max_steps=WARM_UP + work.steps,
        loss_type=loss_type,
        scale_rewards=scale_rewards,
        beta=0.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        bf16=pick_dtype(work.dtype, work.device) == torch.bfloat16,
        use_cpu=work.device.type == "cpu",
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=_given_scores,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(work.sequences // work.group)]}),
        processing_class=AutoTokenizer.from_pretrained(work.folder),
        rollout_func=_given_responses(work, rows),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _given_responses(work: Work, rows: Sequence[TrainingRow]) -> Callable[[list[str], Any], dict[str, Any]]:
    """Prompt "3" stands for group 3; its n-th occurrence gets the group's n-th response."""

    def rollout(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        seen: Counter[int] = Counter()
        chosen = []
        for group in map(int, prompts):
            chosen.append(rows[group * work.group + seen[group]])
            seen[group] += 1
        return {
            "prompt_ids": [row.tokens[: work.prompt].tolist() for row in chosen],
            "completion_ids": [row.tokens[work.prompt :].tolist() for row in chosen],
            "logprobs": [row.infer_logp[work.prompt :].tolist() for row in chosen if row.infer_logp is not None],
            "given_score": [row.score for row in chosen],
        }

    return rollout


def _given_scores(given_score: list[float], **_: Any) -> list[float]:
    return given_score


class _Watch:
    """Times the parts of a trainer's steps from outside."""

    def __init__(self, work: Work, batch: int) -> None:
        self.timing = Timing(f"TRL, {batch} sequences per forward pass")
        self._device = work.device
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._started = self._cpu_started = 0.0

    def attach(self, trainer: Any) -> None:
        """Wrap the trainer's methods, and follow its steps."""
        from transformers import TrainerCallback

        watch = self

        class Steps(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                watch._spent.clear()
                watch._started, watch._cpu_started = watch._now(), time.process_time()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                step = watch._now() - watch._started - watch._spent["inputs"]
                cpu = time.process_time() - watch._cpu_started - watch._spent["inputs on the CPU"]
                rest = step - watch._spent["forward"] - watch._spent["backward"]
                watch.timing.add(step, cpu, {**watch._spent, "optimizer": rest})

        trainer._prepare_inputs = self._timed("inputs", trainer._prepare_inputs)
        trainer.compute_loss = self._timed("forward", trainer.compute_loss)
        trainer.accelerator.backward = self._timed("backward", trainer.accelerator.backward)
        trainer.accelerator.clip_grad_norm_ = self._norms(trainer.accelerator.clip_grad_norm_)
        trainer.add_callback(Steps())

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started, cpu_started = self._now(), time.process_time()
            result = method(*args, **kwargs)
            self._spent[part] += self._now() - started
            self._spent[f"{part} on the CPU"] += time.process_time() - cpu_started
            return result

        return timed

    def _norms(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def clip(*args: Any, **kwargs: Any) -> Any:
            norm = method(*args, **kwargs)
            if not self.timing.norms:
                self.timing.norms.append(float(norm))
            return norm

        return clip

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


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
    parser.add_argument("--steps", type=int, default=10, help=f"Timed steps, after {WARM_UP} that are not.")
    parser.add_argument("--device", default="auto", help="cuda, cpu; auto: a GPU when there is one.")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="Of forward passes.")
    parser.add_argument(
        "--compiled", action=argparse.BooleanOptionalAction, help="Ours: compile the layers (by default: on a GPU)."
    )
    parser.add_argument("--gradients", action="store_true", help="No times: the error of each way's first gradient.")
    parser.add_argument("--trl", action="store_true", help="Also TRL, which must be installed.")
    parser.add_argument(
        "--trl-batches", type=int, nargs="+", default=[16, 32, 64, 128], help="TRL: sequences per forward pass to try."
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if args.trl and _ranks() > 1:
        parser.error("--trl is for one process; start it without torchrun")
    try:
        found = measure(args)
        if os.environ.get("RANK", "0") == "0":
            print(found)
    except AtroposError as error:
        print(f"bench_step: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
