"""Two runs, or two steps of one, next to each other: the same items, and who did better on which.

A side is `run:NAME` or `step:VERSION`. Of an item all responses of a side count; its value is their mean score.
"""

from typing import Any

import numpy as np

from atroposlib.data.table import Table
from atroposlib.errors import ConfigError
from atroposlib.frontend.query import lengths
from atroposlib.type_definitions import Array


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


def compare(table: Table, left: Array, right: Array) -> dict[str, Any]:
    """Compare the responses of two sides item by item.

    Returns:
        `items`: of each item of both sides the group row, mean score and mean length of each side, the greatest
        difference first. `wins`: items on which each side is better, and `ties`; `only`: items of one side alone.
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
        "mean": [_number(np.nanmean(rows["score"])) if len(rows) else None for rows in (a_rows, b_rows)],
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


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)
