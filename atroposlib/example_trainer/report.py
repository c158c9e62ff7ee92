"""What a run says: a line per step, metrics and samples as JSON lines, and wandb when asked.

wandb never prompts: without credentials it logs offline and says so once.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.data import Row
from atroposlib.json_lines import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

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


class Report:
    """Appends to `<log_dir>/metrics.jsonl` and `samples.jsonl`; a resumed run goes on in the same files."""

    def __init__(self, config: TrainingConfig, log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._samples_per_step = config.samples_per_step
        self._metrics = (log_dir / "metrics.jsonl").open("a", encoding="utf-8")
        self._samples = (log_dir / "samples.jsonl").open("a", encoding="utf-8")
        self._wandb = _start_wandb(config, log_dir) if config.use_wandb else None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one finished step."""
        shown = " ".join(f"{name}={_short(metrics[key])}" for name, key in _LINE.items() if key in metrics)
        logger.info("step %d: %s", step, shown)
        self._metrics.write(json.dumps({"step": step, **metrics}) + "\n")
        self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def samples(self, step: int, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase") -> None:
        """Log the first rows of the batch: prompt, response, score."""
        table = [_sample(row, tokenizer) for row in rows[: self._samples_per_step]]
        for sample in table:
            line = json.dumps({"step": step, **sample}, ensure_ascii=False).encode()
            self._samples.write(one_line(line).decode() + "\n")
        self._samples.flush()
        if self._wandb is not None and table:
            import wandb

            columns: list[Any] = list(table[0])
            data: list[Any] = [[sample[column] for column in columns] for sample in table]
            self._wandb.log({"train/samples": wandb.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        """Close the files and finish the wandb run."""
        self._metrics.close()
        self._samples.close()
        if self._wandb is not None:
            self._wandb.finish()


def _sample(row: Row, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Prompt is what precedes the first trained token."""
    first = int(row.trained.argmax()) if row.trained.any() else len(row.tokens)
    return {
        "group": row.group,
        "score": row.score,
        "prompt": tokenizer.decode(row.tokens[:first]),
        "response": tokenizer.decode(row.tokens[first:]),
    }


def _start_wandb(config: TrainingConfig, log_dir: Path) -> Any:
    import wandb

    online = bool(os.environ.get("WANDB_API_KEY")) or (Path.home() / ".netrc").exists()
    mode = os.environ.get("WANDB_MODE") or ("online" if online else "offline")
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
