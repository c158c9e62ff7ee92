"""A question to a set of rollouts: which responses, in which order of their groups; and its answer in numbers.

A group belongs to the answer when one of its responses does. What a filter leaves is described as histograms whose
bars are filters themselves, and can be had as a policy for `atropos sft` or as rollout lines. A value
that is only known once a line was read (a text found, a gap measured) is filled in by a thread while the page already
shows what is there; a file that grows is read on.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field

from atroposlib.data.lazy_group import LazyGroup
from atroposlib.data.policy import SelectionPolicy, pass_rates
from atroposlib.data.rollout_files import Line
from atroposlib.data.table import FINISH_REASONS, UNKNOWN_LENGTH, Table
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.type_definitions import FAILURE_CLASSES, Array, JsonObject

logger = logging.getLogger(__name__)

BARS = 20
Tokens = Annotated[int, Field(ge=-(2**53), le=2**53)]  # as a float holds them
Sorting = Literal[
    "recorded", "score", "-score", "tokens", "-tokens", "rate", "-rate", "spread", "-spread", "task", "gap"
]
"""Orders of groups: as recorded, mean score, longest response, pass rate, spread of scores, task, gap; "-": falling."""


class Query(BaseModel):
    """Limits are inclusive; what is None does not limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str | None = None
    run: str | None = None  # the beginning of its files' names
    weights: str | None = Field(default=None, description="Version of the engine's weights, the trainer's step.")
    finish: str | None = None
    failed: str | None = Field(default=None, description="Groups with a response that failed like this.")
    min_score: float | None = None
    max_score: float | None = None
    min_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    min_rate: float | None = None
    max_rate: float | None = None
    min_gap: float | None = None
    max_gap: float | None = None
    text: str | None = None
    sort: Sorting = "recorded"

    def plain(self, table: Table, runs: list[str]) -> Array:
        """[responses] of bool: within the limits that need nothing but the table. `runs` names each file's."""
        responses = table.responses
        keep = within(responses["score"], self.min_score, self.max_score)
        keep &= within(lengths(table), self.min_tokens, self.max_tokens)
        if self.min_rate is not None or self.max_rate is not None:
            keep &= within(pass_rates(table, 0.0), self.min_rate, self.max_rate)
        for column, names, wanted in (
            ("task", table.tasks, self.task),
            ("weights", table.weights, self.weights),
            ("file", runs, self.run),
        ):
            if wanted is not None:
                keep &= np.isin(table.column(column), [at for at, name in enumerate(names) if name == wanted])
        if self.finish is not None:
            keep &= responses["finish"] == _place(FINISH_REASONS, self.finish)
        if self.failed is not None:
            keep &= (table.column("failed") >> _place(FAILURE_CLASSES, self.failed)) & 1 == 1
        return keep

    def order(self, table: Table, rows: Array, gaps: Array | None) -> Array:
        """The group rows in the order that was asked for; equal ones as recorded, what has no value at the end."""
        name = self.sort.removeprefix("-")
        if name == "recorded" or not len(rows):
            return rows
        if name == "task":
            values = np.argsort(np.argsort(table.tasks, kind="stable"))[table.groups["task"]].astype("f8")
        else:
            values = _group_values(table, name, gaps)
        chosen = values[rows]
        falling = self.sort.startswith("-") or name == "gap"
        return rows[np.argsort(np.where(np.isnan(chosen), np.inf, -chosen if falling else chosen), kind="stable")]

    def policy(self) -> str:
        """YAML of the policy that keeps the same responses, of the same files.

        Raises:
            ConfigError: no step of policies says the same as one of the limits.
        """
        for name in ("failed", "min_gap", "max_gap"):
            if getattr(self, name) is not None:
                raise ConfigError(f"no step of a policy is like the filter {name}; remove it, or export JSONL")
        steps: list[JsonObject] = []
        for name, fields in (
            ("task", {"allow": self.task and [self.task]}),
            ("weights", {"allow": self.weights and [self.weights]}),
            ("finish_reason", {"allow": self.finish and [self.finish]}),
            ("score", {"at_least": self.min_score, "at_most": self.max_score}),
            ("length", {"min_tokens": self.min_tokens, "max_tokens": self.max_tokens}),
            ("pass_rate", {"min": self.min_rate, "max": self.max_rate}),
            ("text", {"contains": self.text}),
        ):
            given = {key: value for key, value in fields.items() if value is not None}
            if given:
                steps.append({"step": name, **given})
        policy = SelectionPolicy.model_validate({"steps": steps})
        head = f"# of the files of run {self.run} only\n" if self.run else ""
        return head + yaml.safe_dump({"seed": policy.seed, "steps": steps}, sort_keys=False, allow_unicode=True)


def lengths(table: Table) -> Array:
    """[responses] completion tokens, NaN where no ids were recorded."""
    completion = table.responses["completion"]
    return np.where(completion == UNKNOWN_LENGTH, np.nan, completion)


def within(values: Array, low: float | None, high: float | None) -> Array:
    """Of bool: the values within the limits; one that is not known (NaN) lies in none."""
    keep = np.ones(len(values), bool)
    if low is not None:
        keep &= values >= low
    return keep if high is None else keep & (values <= high)


def histogram(values: Array) -> JsonObject:
    """Bars from the lowest to the highest value; `from` and `to` are the limits of a query that gives the same `count`.

    Where there are few different values each has a bar of its own; empty bars are left out, `place` is one of `places`.
    """
    values = np.sort(values[np.isfinite(values)])
    if not len(values):
        return {"places": 0, "bars": []}
    different = np.unique(values)
    if len(different) <= BARS:
        bins, places = np.searchsorted(different, values), len(different)
    else:
        low, high = float(values[0]), float(values[-1])
        bins, places = np.minimum((values - low) / (high - low) * BARS, BARS - 1).astype(int), BARS
    starts = np.flatnonzero(np.r_[True, bins[1:] != bins[:-1]])
    ends = np.r_[starts[1:], len(values)]
    bars = [
        {"place": place, "from": least, "to": greatest, "count": count}
        for place, least, greatest, count in zip(
            *(each.tolist() for each in (bins[starts], values[starts], values[ends - 1], ends - starts)), strict=True
        )
    ]
    return {"places": places, "bars": bars}


def by_task(table: Table, keep: Array) -> list[JsonObject]:
    """Of each task among the rows in `keep`: `scored` responses, `accepted` ones of them (score above 0), `unscored`.

    Most responses first. One without a score is neither a failure nor a success.
    """
    tasks, scores = table.column("task")[keep], table.responses["score"][keep]
    counts, scored, accepted = (
        np.bincount(tasks[chosen], minlength=len(table.tasks)).tolist()
        for chosen in (slice(None), ~np.isnan(scores), scores > 0)
    )
    order = sorted(range(len(table.tasks)), key=lambda code: -counts[code])
    return [
        {
            "task": table.tasks[code],
            "scored": scored[code],
            "accepted": accepted[code],
            "unscored": counts[code] - scored[code],
        }
        for code in order
        if counts[code]
    ]


def facets(table: Table, runs: list[str]) -> dict[str, list[str]]:
    """Everything that the selectable filters can be set to."""
    failed = int(np.bitwise_or.reduce(table.groups["failed"])) if len(table.groups) else 0
    finish = np.unique(table.responses["finish"]).tolist()
    return {
        "task": sorted(table.tasks),
        "run": sorted(set(runs)),
        "weights": sorted(table.weights, key=_version_order),
        "finish": [FINISH_REASONS[code] for code in finish],
        "failed": [kind for place, kind in enumerate(FAILURE_CLASSES) if failed >> place & 1],
    }


def _version_order(name: str) -> tuple[bool, int, str]:
    return (not name.isdecimal(), int(name) if name.isdecimal() and len(name) < 20 else 0, name)


def _group_values(table: Table, name: str, gaps: Array | None) -> Array:
    """[groups] of f8, NaN where there is none."""
    score = table.responses["score"]
    if name == "tokens":
        return _per_group(table, np.fmax, lengths(table))
    if name == "rate":
        return _per_group(table, np.fmax, pass_rates(table, 0.0))
    if name == "gap":
        return _per_group(table, np.fmax, gaps if gaps is not None else np.full(len(score), np.nan))
    if name == "spread":
        return _per_group(table, np.fmax, score) - _per_group(table, np.fmin, score)
    group, known = table.responses["group"], ~np.isnan(score)
    count = np.bincount(group, weights=known, minlength=len(table.groups))
    total = np.bincount(group, weights=np.where(known, score, 0), minlength=len(table.groups))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _per_group(table: Table, choose: np.ufunc, values: Array) -> Array:
    """[groups] what `choose` leaves of the known values of each group, NaN where there is none."""
    found = np.full(len(table.groups), np.nan)
    choose.at(found, table.responses["group"], values)
    return found


def _place(names: tuple[str, ...], wanted: str) -> int:
    return names.index(wanted) if wanted in names else 31


def side_rows(table: Table, runs: list[str], side: str) -> Array:
    """[responses] of bool.

    Raises:
        ConfigError: neither `run:` nor `step:`, or there is none of that name.
    """
    kind, _, name = side.partition(":")
    names, column = {"run": (runs, "file"), "step": (table.weights, "weights")}.get(kind, ([], ""))
    if name not in names:
        known = sorted(
            {f"{kind}:{each}" for kind, each in [("run", x) for x in runs] + [("step", x) for x in table.weights]}
        )
        raise ConfigError(f"there is no side {side!r} to compare; there are {', '.join(known[:20])}")
    return np.isin(table.column(column), [at for at, each in enumerate(names) if each == name])


def compare(table: Table, left: Array, right: Array) -> JsonObject:
    """Compare the responses of two sides item by item.

    Returns:
        `items`: of each item of both sides the group row, mean score and mean length of each side, the greatest
        difference first. `wins`: items on which each side is better, and `ties`; `only`: items of one side alone.
        `mean`: of each side's scores on the items of both, null where there are none; `own`: on all items of the side.
    """
    a, b = _by_item(table, left), _by_item(table, right)
    both = np.intersect1d(a["item"], b["item"])
    a_rows, b_rows = (side[np.searchsorted(side["item"], both)] for side in (a, b))
    change = b_rows["score"] - a_rows["score"]
    order = np.argsort(-np.nan_to_num(np.abs(change)), kind="stable")
    return {
        "items": [
            {
                "groups": [int(a_rows["group"][at]), int(b_rows["group"][at])],
                "scores": [_number(a_rows["score"][at]), _number(b_rows["score"][at])],
                "tokens": [_number(a_rows["tokens"][at]), _number(b_rows["tokens"][at])],
            }
            for at in order.tolist()
        ],
        "wins": [int((change < 0).sum()), int((change > 0).sum())],
        "ties": int((change == 0).sum()),
        "only": [len(a) - len(both), len(b) - len(both)],
        "mean": [_mean_score(rows) for rows in (a_rows, b_rows)],
        "own": [_mean_score(rows) for rows in (a, b)],
    }


_ITEM = np.dtype([("item", "u8"), ("group", "u4"), ("score", "f8"), ("tokens", "f8")])


def _by_item(table: Table, keep: Array) -> Array:
    """One row an item, ascending: its first group, the mean score and length of its scored responses."""
    keep = keep & ~np.isnan(table.responses["score"])
    items, first, place = np.unique(table.column("item")[keep], return_index=True, return_inverse=True)
    count = np.bincount(place, minlength=len(items))
    found = np.zeros(len(items), _ITEM)
    found["item"], found["group"] = items, table.responses["group"][keep][first]
    for name, values in (("score", table.responses["score"]), ("tokens", lengths(table))):
        found[name] = np.bincount(place, weights=values[keep], minlength=len(items)) / np.maximum(count, 1)
    return found


def _mean_score(rows: Array) -> float | None:
    return _number(rows["score"].mean()) if len(rows) else None


def _number(value: Array | np.floating | float) -> float | None:
    return None if np.isnan(value) else float(value)


Measure = Callable[[Line, LazyGroup], Sequence[float]]
"""The value of each response of a group; NaN: it has none."""

_UNWATCHED_S = 20.0  # a scan that nobody has asked for this long stops


Read = Callable[[Table, Array], Iterator[tuple[int, Line, LazyGroup]]]
"""Called with a table and rows of it: group row, line and group of each of the rows, ascending."""


class Scan:
    """Values of the responses of a source, filled in by a thread."""

    def __init__(self, read: Read, measure: Measure) -> None:
        self._read, self._measure = read, measure
        self._known: dict[tuple[object, object], Sequence[float]] = {}  # of a group, by its place
        self._table: Table | None = None  # the one asked for last
        self._whole: tuple[Table, Array] | None = None  # a table of which all values are known
        self._asked_at = 0.0
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def values(self, table: Table, *, wait_s: float = 0.0) -> tuple[Array, int]:
        """[responses] of `table`, NaN where nothing is known yet, and how many groups are still to be read.

        Args:
            wait_s: at most, for the reading to end.
        """
        if self._whole is not None and self._whole[0] is table:
            return self._whole[1].copy(), 0
        self._table, self._asked_at = table, time.monotonic()
        thread = self._thread
        if self._unread(table) and not self._has_failed and (thread is None or not thread.is_alive()):
            thread = self._thread = threading.Thread(target=self._run, name="scan", daemon=True)
            thread.start()
        if thread is not None and wait_s:
            thread.join(wait_s)
        values, unread = np.full(len(table.responses), np.nan), self._unread(table)
        starts = table.groups["first"].tolist()
        for start, place in zip(starts, _places(table), strict=True):
            found = self._known.get(place, ())
            values[start : start + len(found)] = found
        if not unread:
            self._whole = table, values.copy()
        return values, len(unread)

    def _unread(self, table: Table) -> list[int]:
        """The group rows of which nothing is known; those without a response have nothing to know."""
        sizes = table.groups["responses"].tolist()
        return [row for row, place in enumerate(_places(table)) if sizes[row] and place not in self._known]

    def _run(self) -> None:
        known = -1
        while (table := self._table) is not None and known < len(self._known) and (rows := self._unread(table)):
            places, known = _places(table), len(self._known)  # where nothing new was read, nothing is there any more
            try:
                for row, line, group in self._read(table, np.array(rows)):
                    self._known[places[row]] = self._measure(line, group)
                    if table is not self._table:
                        break
                    if time.monotonic() - self._asked_at > _UNWATCHED_S:
                        return
            except (AtroposError, OSError) as error:
                logger.warning("%s", error)
                self._has_failed = True
                return


def _places(table: Table) -> list[tuple[object, object]]:
    """File and line of each group, with what tells it from that of a file that took the other's place."""
    files = [table.files[code] for code in table.groups["file"].tolist()]
    return list(zip(files, table.groups[["line", "responses", "size", "id"]].tolist(), strict=True))
