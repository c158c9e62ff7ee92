"""The training loop: wait for a batch, step, tell the engine, now and then a checkpoint.

    resume -> register -> [ batch -> step -> weights to the engine -> checkpoint -> acknowledge ]* -> final weights

Order matters: a batch is acknowledged after the checkpoint that holds its update, so the same command after a kill at
any point continues at the right step with every batch trained exactly once.
wandb never prompts: without credentials it logs offline and says so once.
"""

import json
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
import torch

from atroposlib.envs.hooks import has_credentials
from atroposlib.errors import ConfigError, PathError
from atroposlib.example_trainer import checkpoint as checkpoints
from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.data import (
    BatchFeed,
    TrainingRow,
    generate_times,
    names_other_weights,
    rows_of,
    staleness,
)
from atroposlib.example_trainer.exports import write_whole
from atroposlib.example_trainer.learner import Learner
from atroposlib.example_trainer.weight_sync import WeightSync, WeightSyncError, make_sync, names_versions
from atroposlib.json_lines import one_line
from atroposlib.lock_files import run_lock
from atroposlib.paths import writable_dir
from atroposlib.rollouts.stop import STOP_SIGNALS
from atroposlib.type_definitions import Json, JsonObject

if TYPE_CHECKING:
    import wandb
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FULL_DISK_S, FULL_DISK_RETRY_S = 300.0, 10.0
"""A full disk is waited for, shorter than other ranks wait for the first (ten minutes at NCCL)."""

_LINE = {
    "loss": "train/loss",
    "reward": "batch/reward_mean",
    "grad_norm": "train/grad_norm",
    "kl": "train/kl",
    "entropy": "train/entropy",
    "logprob_diff": "train/logprob_diff_mean",
    "clipped": "train/clip_fraction",
    "zero_signal": "batch/zero_signal_groups",
    "staleness": "batch/staleness_max",
    "tokens": "batch/tokens",
    "generate_s": "time/generate_mean_s",
    "wait_s": "time/wait_s",
    "forward_s": "time/forward_s",
    "backward_s": "time/backward_s",
    "sync_s": "time/sync_s",
    "tokens_per_s": "time/tokens_per_s",
}


class TrainingReport:
    """Appends to `<log_dir>/metrics.jsonl` and `samples.jsonl`; a resumed run continues in the same files."""

    def __init__(self, config: TrainingConfig, log_dir: Path) -> None:
        self._samples_per_step = config.samples_per_step
        self._metrics, self._samples = (_appended(log_dir / name) for name in ("metrics.jsonl", "samples.jsonl"))
        self._wandb = _start_wandb(config, log_dir) if config.use_wandb else None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one finished step."""
        shown = " ".join(f"{name}={_short(metrics[key])}" for name, key in _LINE.items() if key in metrics)
        logger.info("step %d: %s", step, shown)
        self._append(self._metrics, json.dumps({"step": step, **metrics}) + "\n")
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[TrainingRow], tokenizer: "PreTrainedTokenizerBase") -> None:
        """Log the first rows of the batch: prompt, response, score."""
        table = [_sample(row, tokenizer) for row in rows[: self._samples_per_step]]
        lines = [json.dumps({"step": step, **sample}, ensure_ascii=False).encode() for sample in table]
        self._append(self._samples, "".join(one_line(line).decode() + "\n" for line in lines))
        if self._wandb is not None and table:
            import wandb

            columns: list[Json] = list(table[0])
            data: list[Json] = [[sample[column] for column in columns] for sample in table]
            self._wandb.log({"train/samples": wandb.Table(columns=columns, data=data)}, step=step)

    def _append(self, file: TextIO, lines: str) -> None:
        """Write lines; those that find no room wait in memory for the next ones."""
        try:
            file.write(lines)
            file.flush()
        except OSError as error:
            logger.warning("not written for now: file=%s error=%s", file.name, error)

    def close(self) -> None:
        """Close the files and finish the wandb run."""
        for file in (self._metrics, self._samples):
            with suppress(OSError):  # a full disk was told of
                file.close()
        if self._wandb is not None:
            self._wandb.finish()


def _appended(path: Path) -> TextIO:
    """Open for new lines; one that a kill on a full disk cut short stays apart from them."""
    file = path.open("a", encoding="utf-8")
    if file.tell():
        with path.open("rb") as written:
            written.seek(-1, os.SEEK_END)
            file.write("" if written.read() == b"\n" else "\n")
    return file


def _sample(row: TrainingRow, tokenizer: "PreTrainedTokenizerBase") -> JsonObject:
    """Prompt is what precedes the first trained token."""
    first = int(row.trained.argmax()) if row.trained.any() else len(row.tokens)
    return {
        "group": row.group,
        "score": row.score,
        "prompt": tokenizer.decode(row.tokens[:first]),
        "response": tokenizer.decode(row.tokens[first:]),
    }


def _start_wandb(config: TrainingConfig, log_dir: Path) -> "wandb.Run":
    import wandb

    mode = os.environ.get("WANDB_MODE") or ("online" if has_credentials() else "offline")
    if mode == "offline":
        logger.warning("wandb has no credentials and logs offline to %s; `wandb sync` sends it later", log_dir)
    return wandb.init(
        project=config.wandb_project or "atropos",
        group=config.wandb_group,
        name=config.wandb_run_name,
        dir=str(log_dir),
        mode=mode,  # pyright: ignore[reportArgumentType]
        config=config.model_dump(mode="json", exclude={"atropos_url"}),  # which may hold a token
    )


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


_NO_MORE: list[TrainingRow] = []


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands."""

    step: int
    finished: bool  # False: a signal ended it; the same command resumes
    checkpoint: Path | None


def train(config: TrainingConfig) -> TrainResult:
    """Train until `training_steps` or a stop signal; a checkpoint is written either way.

    Raises:
        AtroposError: the API, an engine, the data or the arithmetic failed; the message says which.
    """
    save_path = writable_dir(config.save_path, what="save_path").absolute()
    with run_lock(save_path) if int(os.environ.get("RANK", "0")) == 0 else nullcontext():
        return _train(config, save_path)


def _train(config: TrainingConfig, save_path: Path) -> TrainResult:
    """`train`, with the folder locked against a second trainer."""
    log_dir = writable_dir(config.log_dir, what="log_dir")
    config = config.model_copy(update={"save_path": str(save_path)})
    _seed(config.seed)
    found = checkpoints.newest(save_path)
    if found is not None and not config.resume:
        raise ConfigError(
            f"resume is false, but {save_path} holds {found.name}, which the next start would take for this "
            "run's; choose another save_path, or delete it"
        )
    if found is not None:
        checkpoints.require_same_model(config, found)
    learner = Learner(config, checkpoint=found)
    trained = checkpoints.restore(learner, found) if found else []
    if not learner.ranks.is_first:
        with _stop_flag():  # a signal to all ranks is for the first to act on, which needs the others for its step
            return _follow(learner)
    logger.info("training %s from step %d to %d", config.model_name, learner.step, config.training_steps)
    report = TrainingReport(config, log_dir)
    try:
        with (
            _stop_flag() as stop,
            closing(make_sync(config, save_path, stop)) as sync,
            BatchFeed(config, trained=trained) as feed,
        ):
            return _Run(config, learner, feed, sync, report, save_path, stop).to_the_end()
    finally:
        report.close()


def _follow(learner: Learner) -> TrainResult:
    """Do what every rank but the first does: the same steps on the rows that the first one shares."""
    while rows := learner.ranks.share(_NO_MORE):
        learner.train_on(rows)
    learner.ranks.leave()
    return TrainResult(learner.step, finished=True, checkpoint=None)


class _StopFlag:
    """Set by a signal; the step in progress is finished first."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __call__(self) -> bool:
        return self.signal is not None


@dataclass
class _Run:
    """The parts of a run, put together."""

    config: TrainingConfig
    learner: Learner
    feed: BatchFeed
    sync: WeightSync
    report: TrainingReport
    save_path: Path
    stop: _StopFlag

    def to_the_end(self) -> TrainResult:
        config, learner = self.config, self.learner
        if config.weight_sync != "none":
            self._push()
        self.feed.register(learner.step, self.stop)
        last_saved = learner.step
        while learner.step < config.training_steps and not self.stop():
            if not self._one_step():
                break
            due = learner.step % config.checkpoint_interval == 0 or learner.step == config.training_steps
            if due and learner.step != last_saved and self._save():  # equal after a batch that was all too stale
                last_saved = learner.step
        if last_saved != learner.step and self._save():
            last_saved = learner.step
        learner.ranks.share(_NO_MORE)
        learner.ranks.leave()
        finished = last_saved == learner.step >= config.training_steps
        if finished and config.save_final:
            finished = self._patiently(lambda: write_whole(self.save_path / "final", learner.policy.save_merged))
        if not finished:
            logger.warning("stopped by %s at step %d; the same command resumes", self.stop.signal, learner.step)
        return TrainResult(learner.step, finished, checkpoints.newest(self.save_path))

    def _one_step(self) -> bool:
        """Train on one batch; False when there was none before a stop signal."""
        learner, started = self.learner, time.perf_counter()
        batch = self.feed.next(self.stop)
        if batch is None:
            return False
        arrived = time.perf_counter()
        named = names_versions(self.config)
        groups, facts = fresh_groups(batch.groups, learner.step, self.config.max_staleness, named=named)
        metrics: dict[str, float] = {**facts, **generate_times(groups)}
        rows = rows_of(groups, seq_len=self.config.seq_len, temperature=self.config.temperature)
        self.feed.note_trained(batch)
        if not rows:
            logger.warning("a batch of %d groups was all too stale and is dropped", len(batch.groups))
            if named and any(map(names_other_weights, batch.groups)):
                self._push()  # no step comes that would
            return True
        metrics |= learner.train_on(learner.ranks.share(rows))
        trained = time.perf_counter()
        if learner.step % self.config.sync_interval == 0:
            self._push()
        done = time.perf_counter()
        metrics |= {
            "time/wait_s": arrived - started,
            "time/train_s": trained - arrived,
            "time/sync_s": done - trained,
            "time/step_s": done - started,
            "time/tokens_per_s": sum(len(row.tokens) for row in rows) / (done - started),
        }
        self.report.step(learner.step, metrics)
        self.report.samples(learner.step, rows, learner.policy.tokenizer)
        return True

    def _push(self) -> None:
        self._patiently(lambda: self.sync.push(self.learner.policy, self.learner.step))

    def _save(self) -> bool:
        """Write a checkpoint and acknowledge its batches; False as `_patiently`: they come again."""
        ids, keep = self.feed.unacknowledged, self.config.keep_checkpoints
        is_saved = self._patiently(lambda: checkpoints.save(self.learner, self.save_path, batch_ids=ids, keep=keep))
        if is_saved:
            self.feed.saved(self.stop)
        return is_saved

    def _patiently(self, write: Callable[[], object]) -> bool:
        """Write; again while that cannot be done, as on a full disk, for `FULL_DISK_S`.

        Returns:
            False when a signal came first, and what is not written is for the next start.

        Raises:
            PathError: it cannot be written.
            WeightSyncError: an engine does not take the weights.
        """
        give_up = time.monotonic() + FULL_DISK_S
        while True:
            try:
                write()
                return True
            except (PathError, WeightSyncError) as error:
                if self.stop():
                    logger.warning("%s; left to the next start, as %s ends this one", error, self.stop.signal)
                    return False
                if isinstance(error, WeightSyncError) or time.monotonic() > give_up:
                    raise
                logger.warning("%s; it is tried again until there is room", error)
            pause_over = time.monotonic() + FULL_DISK_RETRY_S
            while time.monotonic() < pause_over and not self.stop():
                time.sleep(0.1)


def fresh_groups(
    groups: Sequence[Mapping[str, Json]], version: int, limit: int | None, *, named: bool = False
) -> tuple[list[Mapping[str, Json]], dict[str, float]]:
    """The groups that are at most `limit` weight updates old (all, without a limit), and the staleness metrics.

    Args:
        named: every push names the weights; an engine that calls them otherwise may serve those of the start.
    """
    ages = [staleness(group, version) for group in groups]
    known = [age for age in ages if age is not None]
    oldest = [version if named and names_other_weights(group) else staleness(group, version) for group in groups]
    kept = [g for g, age in zip(groups, oldest, strict=True) if limit is None or age is None or age <= limit]
    facts: dict[str, float] = {
        "batch/staleness_unknown": len(ages) - len(known),
        "batch/stale_groups_dropped": len(groups) - len(kept),
    }
    if known:
        facts |= {"batch/staleness_mean": sum(known) / len(known), "batch/staleness_max": max(known)}
    return kept, facts


@contextmanager
def _stop_flag() -> Iterator[_StopFlag]:
    """A flag that SIGINT, SIGTERM and SIGUSR1 set while the block lasts."""
    flag = _StopFlag()

    def note(number: int, _frame: object) -> None:
        flag.signal = signal.Signals(number).name

    earlier = {sign: signal.signal(sign, note) for sign in STOP_SIGNALS}
    try:
        yield flag
    finally:
        for sign, handler in earlier.items():
            signal.signal(sign, handler)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
