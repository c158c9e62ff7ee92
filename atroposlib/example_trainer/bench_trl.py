"""TRL's side of `bench_step`: a `GRPOTrainer` that is given its responses. Written against TRL 1.16.

Timed is what lies between the trainer's own `on_step_begin` and `on_step_end`, less the time in which it prepares its
inputs (responses, rewards, advantages), which `bench_step` takes as given.
"""

import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.data import Row
from atroposlib.example_trainer.policy import pick_dtype
from atroposlib.example_trainer.step_timing import WARM_UP, Timing, Work, peak_bytes, start_peak

_LOSSES = {"grpo": ("grpo", "group"), "dr_grpo": ("dr_grpo", "none")}
"""TRL's loss_type and scale_rewards of an objective."""


def time_trl(work: Work, rows: Sequence[Row], batch: int) -> Timing | None:
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


def _trainer(work: Work, rows: Sequence[Row], batch: int, folder: str) -> Any:
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


def _given_responses(work: Work, rows: Sequence[Row]) -> Callable[[list[str], Any], dict[str, Any]]:
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
            if not self.timing.seconds:
                self.timing.first_norm = float(norm)
            return norm

        return clip

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
