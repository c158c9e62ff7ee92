"""Problems in GSM8K's form, from a .jsonl file or the model hub."""

import json
import random
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

from atroposlib.errors import ConfigError, DataError
from atroposlib.paths import expand_path

EVAL_EVERY = 10
"""Of a file without a test split, every so many-th problem is kept for evaluation."""

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class Question(TypedDict):
    """One problem."""

    question: str
    gold: str  # a number or LaTeX


class Split(TypedDict):
    """Problems to train on, and others to evaluate with."""

    train: list[Question]
    test: list[Question]


def load_problems(dataset: str, eval_dataset: str | None) -> Split:
    """Both splits of `dataset` (a path that ends in .jsonl, or a name on the hub), or the test split of another one.

    Raises:
        ConfigError: the package datasets is missing, or the file is.
        DataError: a line is not a problem, or a split is empty.
    """
    if eval_dataset is not None:
        split = Split(train=_load(dataset, "train"), test=_load(eval_dataset, "test"))
    elif dataset.endswith(".jsonl"):
        problems = _load(dataset, "train")
        kept = problems[EVAL_EVERY - 1 :: EVAL_EVERY]
        split = Split(train=[p for i, p in enumerate(problems, 1) if i % EVAL_EVERY], test=kept)
    else:
        split = Split(train=_load(dataset, "train"), test=_load(dataset, "test"))
    if not split["train"] or not split["test"]:
        counts = f"{len(split['train'])} problems to train on and {len(split['test'])} to evaluate with"
        raise DataError(f"{dataset} gives {counts}; at least one of each is needed, so a file needs {EVAL_EVERY} lines")
    return split


@lru_cache(maxsize=2)
def order(count: int, seed: str) -> list[int]:
    """A shuffled order of `count` problems, the same for the same seed."""
    return random.Random(seed).sample(range(count), count)


def _load(dataset: str, split: str) -> list[Question]:
    return _read(expand_path(dataset, what="env.dataset")) if dataset.endswith(".jsonl") else _fetch(dataset, split)


def _read(path: Path) -> list[Question]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # `splitlines` also ends lines inside of texts
    except OSError as error:
        raise ConfigError(f"env.dataset {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; convert it") from None
    problems = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                problems.append(to_question(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                wanted = 'an object like {"question": "...", "answer": "... #### 42"}'
                raise DataError(f"{path} line {number} is no problem ({error!r}); expected {wanted}") from None
    return problems


def _fetch(name: str, split: str) -> list[Question]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]  # an optional package
    except ImportError:
        raise ConfigError(
            f"env.dataset {name!r} is on the model hub, which needs the package datasets; "
            "pip install 'atroposlib[envs]', or name a .jsonl file"
        ) from None
    rows: Iterable[Mapping[str, Any]] = load_dataset(name, "main", split=split)
    return [to_question(row) for row in rows]


def to_question(row: Mapping[str, Any]) -> Question:
    """GSM8K's answers give the solution, then `#### 42`; a bare number will do.

    >>> to_question({"question": "6 times 7?", "answer": "It is 42. #### 42"})
    {'question': '6 times 7?', 'gold': '42'}
    """
    answer = _THOUSANDS.sub("", str(row["answer"]).rpartition("####")[2].strip())
    if not answer or row["answer"] is None or not isinstance(row["question"], str):
        raise ValueError("no question, or no answer")
    return Question(question=row["question"], gold=answer)
