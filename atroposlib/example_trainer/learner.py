"""One optimizer step: plan, forward and backward per micro-batch, clip, update, metrics.

Several processes may train the same weights, each on its share of a step's micro-batches:

    accelerate launch --num_processes 4 -m atroposlib.example_trainer.grpo --config RECIPE

Every process holds the whole model. The first one talks to API, engine and disk; the others get its batches. Alone, all
of this does nothing.
"""

import itertools
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.data import TrainingRow
from atroposlib.example_trainer.layout import MicroBatch, collate, micro_batches
from atroposlib.example_trainer.losses.policy import clip_counts, ratio
from atroposlib.example_trainer.objective import KLController, MicroLoss, StepPlan, TauController, micro_loss, plan
from atroposlib.example_trainer.policy import Policy, shares_prompts
from atroposlib.example_trainer.token_scores import TokenScores
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE = timedelta(days=1)
"""Patience of a process with the others. They wait while the first one waits for a batch, so torch's 10 minutes are
too short; a process that died ends the others at once, through the launcher."""


class Ranks:
    """This process among `size`; `is_first` is the one that talks to the world."""

    def __init__(self, device: torch.device) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        if self.size > 1:
            from accelerate import PartialState

            PartialState(cpu=device.type == "cpu", timeout=_PATIENCE)

    @property
    def is_first(self) -> bool:
        """True alone, too."""
        return self.rank == 0

    def share(self, value: T) -> T:
        """The first process's value, in every process; must be called by all."""
        if self.size == 1:
            return value
        from accelerate.utils import broadcast_object_list

        holder = [value]
        broadcast_object_list(holder, from_process=0)
        return holder[0]

    def gather(self, value: T) -> list[T]:
        """Every process's value, in order of rank."""
        if self.size == 1:
            return [value]
        from accelerate.utils import gather_object

        return gather_object([value])

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of all processes; a process without one counts as zeros."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if bucket and sum(map(Tensor.numel, bucket)) + parameter.numel() > _BUCKET:
                _sum_over_ranks(bucket)
                bucket = []
            bucket.append(parameter.grad)
        _sum_over_ranks(bucket)

    def leave(self) -> None:
        """End the connections to the other processes; without it torch's threads can abort a process that exits."""
        if self.size > 1:
            torch.distributed.destroy_process_group()


_BUCKET = 2**25
"""Numbers of one all-reduce: a hundred small ones take longer than what they send."""


def _sum_over_ranks(values: Sequence[Tensor]) -> None:
    """Replace each of these by its sum over all ranks, in one all-reduce."""
    flat = torch.cat([value.flatten() for value in values])
    torch.distributed.all_reduce(flat)
    for value, summed in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(summed.view_as(value))


class StepStats:
    """Counts over the trained tokens of a step, one entry for each micro-batch.

    What a micro-batch adds stays on its device until `read`, so that no GPU waits for a number.
    """

    def __init__(self) -> None:
        self._entries: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def add(self, scores: TokenScores, part: MicroLoss, micro: MicroBatch, eps: tuple[float, float]) -> None:
        """Count one micro-batch."""
        trained, infer_logp, logp = micro.mask > 0, micro.infer_logp, scores.logp.detach()
        known = trained & infer_logp.isfinite()
        gaps = (logp - torch.where(known, infer_logp, logp)).abs()
        ratios = torch.where(trained, ratio(logp, part.old_logp), 0.0)
        clipped = clip_counts(logp, part.old_logp, part.advantages, micro.mask, eps_low=eps[0], eps_high=eps[1])

        def total(values: Tensor | None) -> Tensor:
            return micro.mask.new_zeros(()) if values is None else values.masked_fill(~trained, 0.0).sum()

        taught = micro.teacher_logp if part.teacher_kl is not None else None
        self._entries.append(
            {
                "tokens": clipped.tokens,
                "logprob_diff": gaps.sum(),
                "compared": known.sum(),
                "ratio": ratios.sum(),
                "clip_low": clipped.low,
                "clip_high": clipped.high,
                "entropy": total(scores.entropy),
                "kl": total(part.kl),
                "teacher_kl": total(part.teacher_kl),
                "taught": total(None if taught is None else taught.isfinite().any(-1).float()),
                "logprob_diff_max": gaps.max(),
                "ratio_max": ratios.max(),
            }
        )

    def read(self) -> list[dict[str, float]]:
        """Return the entries as numbers."""
        tables = (torch.stack([value.double() for value in entry.values()]).tolist() for entry in self._entries)
        return [dict(zip(entry, numbers, strict=True)) for entry, numbers in zip(self._entries, tables, strict=True)]


def token_metrics(entries: Sequence[Mapping[str, float]], *, entropy: bool, kl: bool) -> dict[str, float]:
    """Means and maxima of the entries of all ranks, by metric name; empty when nothing was trained."""
    if not sum(entry["tokens"] for entry in entries):
        return {}
    sums = {name: sum(entry[name] for entry in entries) for name in entries[0]}
    tops = {name: max(entry[name] for entry in entries) for name in ("ratio_max", "logprob_diff_max")}
    mean = {name: value / sums["tokens"] for name, value in sums.items()}
    found = {
        "train/ratio_mean": mean["ratio"],
        "train/ratio_max": tops["ratio_max"],
        "train/clip_low": mean["clip_low"],
        "train/clip_high": mean["clip_high"],
        "train/clip_fraction": mean["clip_low"] + mean["clip_high"],
        "train/logprob_unknown": 1 - mean["compared"],
    }
    if sums["compared"]:
        found["train/logprob_diff_mean"] = sums["logprob_diff"] / sums["compared"]
        found["train/logprob_diff_max"] = tops["logprob_diff_max"]
    if entropy:
        found["train/entropy"] = mean["entropy"]
    if kl:
        found["train/kl"] = mean["kl"]
    if sums["taught"]:
        found["train/teacher_kl"] = sums["teacher_kl"] / sums["taught"]
        found["train/taught"] = mean["taught"]
    return found


_PARTS = ("reference", "forward", "backward", "optimizer")


class TrainingError(AtroposError, ArithmeticError):
    """The loss or the gradient is not a finite number; the weights were not changed."""


class _Clock:
    """Seconds spent per part of the step; on a GPU by its own events, so that nothing is waited for on the way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, Any]] = [("start", self._mark())]

    def lap(self, part: str) -> None:
        """Book the time since the last call under `part`."""
        self._marks.append((part, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Wait for the GPU; return the seconds of each part so far."""
        found: dict[str, float] = dict.fromkeys(_PARTS, 0.0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for (_, before), (part, now) in itertools.pairwise(self._marks):
            found[part] += before.elapsed_time(now) / 1000 if self.device.type == "cuda" else now - before
        return found

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


class Learner:
    """Policy, optimizer and controllers; `step` counts finished optimizer steps."""

    def __init__(self, config: TrainingConfig, *, checkpoint: Path | None = None) -> None:
        self.config = config
        self.policy = Policy(config, checkpoint=checkpoint)
        self.share_prompts = shares_prompts(config, self.policy.bare)
        self.ranks = Ranks(self.policy.device)
        self.optimizer = make_optimizer(config, self.policy)
        self.scheduler = make_scheduler(config, self.optimizer)
        self.kl = KLController(
            config.init_kl_coeff, config.kl_target, config.kl_horizon, config.kl_control, config.kl_ctl_step_size
        )
        self.tau = TauController(
            config.maxent_tau,
            config.maxent_target_weight_entropy,
            config.maxent_tau_lr,
            tau_min=config.maxent_tau_min,
            tau_max=config.maxent_tau_max,
            warmup_steps=config.maxent_tau_warmup_steps,
        )
        self.step = 0

    def train_on(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """One optimizer step on whole groups; the metrics. Every rank calls it with the same rows.

        Raises:
            TrainingError: loss or gradient is not finite.
            DataError: log-probabilities are missing, or a token is none of the model's.
        """
        self.policy.require_known_tokens(rows)
        config, clock = self.config, _Clock(self.policy.device)
        beta = self.kl.beta
        references = self._references(rows) if beta > 0 else {}
        step = plan(config, rows, tau=self.tau.tau, beta=beta, ref_sums=_sums(references, len(rows)))
        clock.lap("reference")
        used = [i for i in range(len(rows)) if step.signal[i]]
        if config.objective == "distill" and all(row.teacher_logp is None for row in rows):
            logger.warning("a batch of %d sequences has no teacher's view, so nothing is learnt from it", len(rows))
        stats, losses = StepStats(), []
        chosen = [rows[i] for i in used]
        for lines in self._micro_batches(chosen):
            micro = collate(rows, [[used[i] for i in line] for line in lines], self.policy.device)
            ref_logp = _reference_of(references, micro)
            scores = self.policy.score(micro, entropy=config.entropy_metric, teacher=config.teacher_weight > 0)
            part = micro_loss(config, step, rows, micro, scores, ref_logp=ref_logp, beta=beta)
            clock.lap("forward")
            part.loss.backward()
            clock.lap("backward")
            losses.append(part.loss.detach())
            stats.add(scores, part, micro, (config.preset.eps_low, config.preset.eps_high))
        loss = sum(self.ranks.gather(sum(map(float, losses))))
        if used:  # else no weight moves, as in a single process
            self.ranks.sum_gradients(self.policy.trainable)
        entries = [entry for part in self.ranks.gather(stats.read()) for entry in part]
        grad_norm = self._update(loss)
        clock.lap("optimizer")
        self.step += 1
        metrics = token_metrics(entries, entropy=config.entropy_metric, kl=beta > 0)
        self.kl.update(metrics.get("train/kl", float("nan")), len(rows))
        maxent = {}
        if step.weight_entropy is not None:
            maxent = {"maxent/tau": self.tau.update(step.weight_entropy), "maxent/weight_entropy": step.weight_entropy}
        return {
            **_facts(step, rows, config),
            **metrics,
            **_times(clock, rows, used),
            "train/loss": loss,
            "train/grad_norm": grad_norm,
            "train/lr": self.optimizer.param_groups[0]["lr"],
            "train/beta": self.kl.beta,
            **maxent,
        }

    def _update(self, loss: float) -> float:
        """Clip and apply the gathered gradient; its norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.trainable, self.config.max_grad_norm))
        if not torch.isfinite(torch.tensor([loss, norm])).all():
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"step {self.step + 1}: loss {loss}, gradient norm {norm}; look at train/ratio_max and "
                "train/logprob_diff_max of the last steps, and lower lr or set dtype to float32"
            )
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _references(self, rows: Sequence[TrainingRow]) -> dict[int, Tensor]:
        """Reference log-probabilities [T-1] of every row."""
        found: dict[int, Tensor] = {}
        for lines in self._micro_batches(rows):
            micro = collate(rows, lines, self.policy.device)
            logp = self.policy.reference_logp(micro)
            for values, number in zip(logp, micro.rows, strict=True):
                found[number] = values[: max(0, len(rows[number].tokens) - 1)].cpu()
        return {number: values for part in self.ranks.gather(found) for number, values in part.items()}

    def _micro_batches(self, rows: Sequence[TrainingRow]) -> list[list[list[int]]]:
        """Return those that are this rank's."""
        limit, size = self.config.micro_batch_tokens, self.ranks.size
        cut = micro_batches(rows, limit, share=self.share_prompts, multiple_of=size)
        return cut[self.ranks.rank :: size]


def make_optimizer(config: TrainingConfig, policy: Policy) -> torch.optim.Optimizer:
    """The optimizer by name; ConfigError when its package is not there."""
    parameters: list[nn.Parameter] | list[JsonObject] = policy.trainable
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
    if config.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(
            parameters,
            lr=None if config.adafactor_relative_step else config.lr,
            scale_parameter=config.adafactor_scale_parameter,
            relative_step=config.adafactor_relative_step,
        )
    try:
        from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("optimizer adamw_8bit needs the package bitsandbytes; install it or use adamw") from error
    return AdamW8bit(parameters, lr=config.lr, weight_decay=config.weight_decay)


def make_scheduler(config: TrainingConfig, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then constant, linear or cosine to 0 at `training_steps`."""
    from transformers import get_scheduler
    from transformers.optimization import Adafactor, AdafactorSchedule

    if isinstance(optimizer, Adafactor) and config.adafactor_relative_step:
        return AdafactorSchedule(optimizer)  # reports the optimizer's own lr
    name = {"constant": "constant_with_warmup"}.get(config.lr_schedule, config.lr_schedule)
    return get_scheduler(name, optimizer, config.warmup_steps, config.training_steps)  # pyright: ignore


def _sums(references: dict[int, Tensor], rows: int) -> Tensor | None:
    """[N] sums over trained tokens: other positions are 0 already."""
    return torch.stack([references[i].sum() for i in range(rows)]) if references else None


def _reference_of(references: dict[int, Tensor], micro: MicroBatch) -> Tensor | None:
    """[B,T] reference log-probabilities of a micro-batch."""
    if not references:
        return None
    table = torch.zeros_like(micro.mask)
    for line, number in zip(table, micro.rows, strict=True):
        line[: len(references[number])] = references[number]
    return table


def _facts(step: StepPlan, rows: Sequence[TrainingRow], config: TrainingConfig) -> dict[str, float]:
    """Return metrics of a batch that need no model."""
    lengths = [row.trained_tokens for row in rows]
    return {
        "batch/reward_mean": float(step.rewards.mean()),
        "batch/reward_std": float(step.rewards.std(correction=0)),
        "batch/sequences": len(rows),
        "batch/groups": step.groups.count,
        "batch/zero_signal_groups": int(step.groups.is_constant(step.rewards).sum()),
        "batch/tokens": step.totals.tokens,
        "batch/length_mean": sum(lengths) / len(lengths),
        "batch/length_max": max(lengths),
        "batch/truncated": sum(length >= config.max_completion_length for length in lengths) / len(lengths),
    }


def _times(clock: _Clock, rows: Sequence[TrainingRow], used: Sequence[int]) -> dict[str, float]:
    seconds = clock.seconds()
    busy = sum(seconds.values())
    tokens = sum(len(rows[i].tokens) for i in used)
    return {f"time/{part}_s": value for part, value in seconds.items()} | {
        "time/train_tokens_per_s": tokens / busy if busy else 0.0
    }
