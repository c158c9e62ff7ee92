"""What `bench_step` measures: the learner's step, and TRL's, on the same made-up sequences."""

import argparse
import gc
import importlib.metadata
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.data import Row
from atroposlib.example_trainer.learner import Learner
from atroposlib.example_trainer.model_folder import model_folder
from atroposlib.example_trainer.policy import pick_device, pick_dtype

PARTS = ("forward", "backward", "optimizer")
WARM_UP = 2
"""Steps that are not timed: memory is claimed and kernels are chosen."""
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
    first_norm: float = float("nan")  # of the first gradient, before clipping
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
        return f"| {self.side} | {' | '.join(cells)} | {self.first_norm:.5g} |"


def make_rows(work: Work, vocabulary: int, seed: int = 0) -> list[Row]:
    """Random ids and scores; the responses of a group share their prompt, and no score equals its group's mean."""
    random = np.random.default_rng(seed)
    rows: list[Row] = []
    for number in range(work.sequences):
        new_group = number % work.group == 0
        prompt = random.integers(vocabulary, size=work.prompt) if new_group else rows[-1].tokens[: work.prompt]
        tokens = np.concatenate([prompt, random.integers(vocabulary, size=work.completion)])
        trained = np.arange(len(tokens)) >= work.prompt
        logp = np.where(trained, random.normal(-2, 0.5, len(tokens)), 0.0).astype(np.float32)
        rows.append(Row(tokens, trained, logp, float(random.normal()), number // work.group, temperature=1.0))
    return rows


def time_ours(work: Work, rows: Sequence[Row], micro_batch_tokens: int, *, share_prompts: bool) -> Timing:
    """The learner's step on prepared rows."""
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(
            TrainingConfig.model_validate(
                {
                    "model_name": str(work.folder),
                    "device": str(work.device),
                    "dtype": work.dtype,
                    "objective": work.objective,
                    "std_ddof": 1,  # TRL's
                    "old_logprobs": "trainer",
                    "batch_size": work.sequences,
                    "gradient_accumulation_steps": 1,
                    "seq_len": work.prompt + work.completion,
                    "max_completion_length": work.completion,
                    "micro_batch_tokens": micro_batch_tokens,
                    "share_prompts": share_prompts,
                    "save_path": folder,
                }
            )
        )
    timing = Timing("ours" if share_prompts else "ours, each prompt computed every time")
    start_peak(work.device)
    for _ in range(WARM_UP + work.steps):
        started, cpu_started = time.perf_counter(), time.process_time()
        metrics = learner.train_on(rows)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        timing.add(seconds, cpu_seconds, {part: metrics[f"time/{part}_s"] for part in PARTS})
        if len(timing.seconds) == 1:
            timing.first_norm = metrics["train/grad_norm"]
    timing.peak_bytes = peak_bytes(work.device)
    return timing


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
        f"{work.objective}, {pick_dtype(work.dtype, work.device)}, {work.steps} steps, {name}",
        f"| side | s a step | CPU s | tokens/s | {' | '.join(PARTS)} | peak {memory} GiB | first gradient norm |",
        "|---|---|---|---|---|---|---|---|---|",
        *(timing.row(work) for timing in timings),
        f"python {sys.version.split()[0]}, " + ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
    ]
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> str:
    """The table of what the command's flags ask for."""
    if args.sequences % args.group:
        raise ConfigError(f"--sequences {args.sequences} is not a multiple of --group {args.group}; change one")
    names = ("sequences", "group", "prompt", "completion", "steps", "objective", "dtype")
    work = Work(model_folder(args.model), pick_device(args.device), **{name: getattr(args, name) for name in names})
    rows = make_rows(work, _vocabulary(work.folder))
    timings: list[Timing] = []
    for timing in _sides(args, work, rows):
        print(timing.row(work), file=sys.stderr, flush=True)
        timings.append(timing)
    return table(work, timings)


def _sides(args: argparse.Namespace, work: Work, rows: Sequence[Row]) -> Iterator[Timing]:
    """One after the other, each gone from memory before the next."""
    for share in (True, False):
        yield time_ours(work, rows, args.micro_batch_tokens, share_prompts=share)
    if args.trl:
        from atroposlib.example_trainer.bench_trl import time_trl

        for batch in args.trl_batches:
            timing = time_trl(work, rows, batch) if args.sequences % batch == 0 else None
            if timing is not None:
                yield timing


def _vocabulary(folder: Path | str) -> int:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder).vocab_size


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"
