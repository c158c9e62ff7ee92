"""The training part of a run, read from the trainer's `metrics.jsonl` and `samples.jsonl`, and its evaluations."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atroposlib.charts import Series, line_chart
from atroposlib.json_lines import object_in
from atroposlib.type_definitions import JsonObject

EVALUATIONS = "evaluations"
"""Folder of the evaluations in a training run's."""
HISTORY_FILE = "history.jsonl"
"""One line for each evaluation next to a trainer, in the folder of its results."""
MOST_POINTS = 720
_EVALUATION_CHARTS = 6
_SAMPLES = 8
_SAMPLE_BYTES = 4_000_000
_TAIL_BYTES = 65_536
_CHARTS: tuple[tuple[str, tuple[str, ...], str, float], ...] = (  # title, metrics, unit, factor
    ("reward", ("batch/reward_mean",), "", 1),
    ("entropy (nats)", ("train/entropy",), "", 1),
    ("KL to the reference (nats)", ("train/kl",), "", 1),
    ("clipped", ("train/clip_fraction",), "%", 100),
    ("engine-trainer gap (nats)", ("train/logprob_diff_mean",), "", 1),
    ("staleness (steps)", ("batch/staleness_mean", "batch/staleness_max"), "", 1),
    ("seconds of a step", ("time/wait_s", "time/train_s", "time/sync_s"), "", 1),
    ("tokens per second of the trainer", ("time/tokens_per_s",), "", 1),
)


@dataclass(frozen=True)
class Training:
    """Steps taken of `of`; `points` are the metrics of at most MOST_POINTS steps, the last one included."""

    step: int = 0
    of: int = 0
    points: list[dict[str, float]] = field(default_factory=list)
    samples: list[JsonObject] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # step, metrics

    @property
    def last(self) -> Mapping[str, float]:
        """The metrics of the newest step."""
        return self.points[-1] if self.points else {}

    def line(self) -> str:
        """Return the newest step in one line.

        >>> Training(1, 9, [{"step": 1, "batch/reward_mean": 0.25, "batch/reward_std": 0.5, "time/step_s": 2.0}]).line()
        'step 1/9, reward 0.25 ± 0.5, 2 s a step'
        """
        last = self.last
        parts = [f"step {self.step}/{self.of}"]
        if "batch/reward_mean" in last:
            parts.append(f"reward {last['batch/reward_mean']:.3g} ± {last.get('batch/reward_std', 0):.3g}")
        for name, key in (("entropy", "train/entropy"), ("KL", "train/kl")):
            if key in last:
                parts.append(f"{name} {last[key]:.3g}")
        if "train/clip_fraction" in last:
            parts.append(f"clipped {last['train/clip_fraction']:.1%}")
        if "batch/staleness_max" in last:
            parts.append(f"staleness {last['batch/staleness_max']:.0f}")
        if "time/step_s" in last:
            named = {"wait": "time/wait_s", "train": "time/train_s", "sync": "time/sync_s"}
            split = ", ".join(f"{name} {last[key]:.2g}" for name, key in named.items() if key in last)
            parts.append(f"{last['time/step_s']:.3g} s a step" + (f" ({split})" if split else ""))
        if "time/tokens_per_s" in last:
            parts.append(f"{last['time/tokens_per_s']:.0f} tok/s")
        return ", ".join(parts)

    def charts(self) -> list[str]:
        """Return what people look at over the steps, as SVG; metrics that the trainer did not log are left out."""
        drawn = []
        for title, keys, unit, factor in _CHARTS:
            lines = [
                Series(
                    key.rpartition("/")[2].rpartition("_")[0 if key.startswith("time/") else 2],
                    [(point["step"], _times(point.get(key), factor)) for point in self.points],
                )
                for key in keys
                if any(point.get(key) is not None for point in self.points)
            ]
            if lines:
                band = [_around(point) for point in self.points] if title == "reward" else ()
                drawn.append(line_chart(title, lines, unit=unit, band=band, over="steps"))
        return drawn + self._evaluation_charts()

    def _evaluation_charts(self) -> list[str]:
        """One for each metric that is no bound of an interval; of pass@1, pass@2, ... the one with the largest k."""
        names = dict.fromkeys(name for _, metrics in self.evaluations for name in metrics)
        largest: dict[str, str] = {}
        for name in sorted((n for n in names if not n.endswith(("_ci_low", "_ci_high"))), key=_samples_of):
            largest[name.partition("@")[0]] = name
        return [
            line_chart(
                f"evaluation: {name.removeprefix('eval/')}",
                [Series(name, [(step, metrics.get(name)) for step, metrics in self.evaluations])],
                band=[
                    (metrics.get(f"{name}_ci_low"), metrics.get(f"{name}_ci_high")) for _, metrics in self.evaluations
                ],
                over="steps",
            )
            for name in sorted(largest.values(), key=lambda name: "@" not in name)[:_EVALUATION_CHARTS]
        ]


def _around(point: Mapping[str, float]) -> tuple[float, float]:
    """The mean reward of a step, less and plus its standard deviation; NaN where one is missing."""
    mean, deviation = (point.get(f"batch/reward_{name}", math.nan) for name in ("mean", "std"))
    return mean - deviation, mean + deviation


def read_training(folder: Path, of: int, *, only_last: bool = False) -> Training:
    """Read what a trainer has written into `folder`; a line that is cut short is left out.

    Args:
        only_last: the newest step, from the end of the file.
    """
    lines = last_lines(folder / "metrics.jsonl", _TAIL_BYTES if only_last else None)
    rows = [_numbers(row) for line in lines if (row := object_in(line)) and isinstance(row.get("step"), int)]
    by_step = {row["step"]: row for row in rows}  # a step that was repeated after a kill counts once, as last done
    rows = [by_step[step] for step in sorted(by_step)]
    every = -(-len(rows) // MOST_POINTS) or 1
    points = rows[::-1][::every][::-1]
    samples = [
        row for line in last_lines(folder / "samples.jsonl", _SAMPLE_BYTES)[-_SAMPLES:] if (row := object_in(line))
    ]
    evaluations = [] if only_last else read_evaluations(folder.parent / EVALUATIONS)
    return Training(rows[-1]["step"] if rows else 0, of, points, samples, evaluations)


def read_evaluations(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Return step and metrics of each evaluation, in order of steps; one that was repeated after a kill counts once."""
    by_step: dict[int, dict[str, float]] = {}
    for line in last_lines(folder / HISTORY_FILE):
        row = object_in(line) or {}
        if isinstance(row.get("step"), int) and isinstance(row.get("metrics"), dict):
            by_step[row["step"]] = _numbers(row["metrics"])
    return sorted(by_step.items())


def last_lines(path: Path, last_bytes: int | None = None) -> list[bytes]:
    """Return the whole lines of a file, or of its last bytes; [] when it cannot be read."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            skipped = max(0, size - last_bytes) if last_bytes else 0
            stream.seek(skipped)
            lines = stream.read().split(b"\n")[:-1]
    except OSError:
        return []
    return lines[1:] if skipped else lines


def _samples_of(metric: str) -> int:
    """Return the k of a name that ends in `@k`, else 0."""
    k = metric.rpartition("@")[2]
    return int(k) if k.isdigit() else 0


def _numbers(row: JsonObject) -> JsonObject:
    return {key: value for key, value in row.items() if isinstance(value, int | float)}


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
