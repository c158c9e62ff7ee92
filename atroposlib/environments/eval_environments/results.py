"""Results of evaluations: a table of several, and two compared item by item.

A result is a folder with `metrics.json` and `samples.jsonl`, as every evaluation writes it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError, DataError
from atroposlib.paths import expand_path
from atroposlib.type_definitions import JsonObject
from atroposlib.utils.eval_statistics import Paired, paired_test


def table(folders: Sequence[str]) -> str:
    """Return results as Markdown: a row for each folder and metric, with standard error or interval where there is one.

    Raises:
        ConfigError: a folder has no metrics.json.
    """
    lines = ["| result | model | metric | value | ± standard error, 95% interval |", "|---|---|---|---|---|"]
    for folder in folders:
        found = _metrics(folder)
        model, metrics = found["config_general"]["model_name"], found["results"]["all"]
        for name, value in metrics.items():
            if not name.endswith(("_stderr", "_ci_low", "_ci_high")):
                lines.append(f"| {folder} | {model} | {name} | {_number(value)} | {_spread(metrics, name)} |")
    return "\n".join(lines)


def compare(first: str, second: str) -> Paired:
    """Compare the scores of two results on the items that both have; DataError when there are none."""
    ours, theirs = _scores(first), _scores(second)
    shared = [key for key in ours if key in theirs]
    if not shared:
        raise DataError(f"{first} and {second} have no item in common, so there is nothing to compare")
    return paired_test([ours[key] for key in shared], [theirs[key] for key in shared])


def _metrics(folder: str) -> JsonObject:
    return json.loads(_read(folder, "metrics.json"))


def _scores(folder: str) -> dict[str, float]:
    """Mean grade of every item, by the item."""
    found: dict[str, float] = {}
    for line in _read(folder, "samples.jsonl").splitlines():
        sample = json.loads(line)
        if "item" not in sample or not sample.get("grades"):
            raise DataError(f"{folder}/samples.jsonl holds samples without item and grades, which cannot be compared")
        found[json.dumps(sample["item"], sort_keys=True)] = sum(sample["grades"]) / len(sample["grades"])
    return found


def _read(folder: str, name: str) -> str:
    path: Path = expand_path(folder, what="RESULT") / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; give a folder that --env.data_dir_to_save_evals named"
        ) from error


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _spread(metrics: dict[str, Any], name: str) -> str:
    error, low, high = (metrics.get(f"{name}_{part}") for part in ("stderr", "ci_low", "ci_high"))
    found = [f"± {error:.4f}"] if error is not None else []
    return ", ".join([*found, f"{low:.4f} to {high:.4f}"] if low is not None else found) or "-"
