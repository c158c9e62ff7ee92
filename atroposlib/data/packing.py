"""Packing token records into rows of at most a fixed length, with position ids that start anew at each sequence."""

import bisect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from atroposlib.errors import DataError
from atroposlib.type_definitions import Array

WINDOW_TOKENS = 2_000_000  # of ids held at once: 16 MB with their labels


def pack(records: Iterable[Mapping[str, Any]], row_tokens: int) -> Iterator[dict[str, Any]]:
    """Best-fit decreasing over windows of `WINDOW_TOKENS`; a sequence is never split.

    Args:
        records: of the `tokens` format.
        row_tokens: most tokens of a row.

    Yields:
        input_ids, attention_mask, labels, position_ids: all [at most row_tokens].

    Raises:
        DataError: a sequence is longer than a row.
    """
    window: list[tuple[Array, Array]] = []
    held = 0
    for record in records:
        ids = np.array(record["input_ids"], np.int32)
        if len(ids) > row_tokens:
            raise DataError(
                f"a sequence has {len(ids)} tokens, but --pack is {row_tokens}; raise it, or drop long ones with a "
                f"policy step {{step: length, of: total, max_tokens: {row_tokens}}}"
            )
        window.append((ids, np.array(record["labels"], np.int32)))
        held += len(ids)
        if held >= WINDOW_TOKENS:
            yield from _pack_window(window, row_tokens)
            window, held = [], 0
    yield from _pack_window(window, row_tokens)


def best_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """Bins of indices into `sizes`, each adding up to at most `capacity`: best-fit decreasing.

    >>> best_fit([5, 4, 3, 2], capacity=7)
    [[0, 3], [1, 2]]
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        at = bisect.bisect_left(free, (sizes[index], -1))
        if at == len(free):
            bins.append([])
            room, chosen = capacity, len(bins) - 1
        else:
            room, chosen = free.pop(at)
        bins[chosen].append(index)
        bisect.insort(free, (room - sizes[index], chosen))
    return bins


def _pack_window(window: list[tuple[Array, Array]], row_tokens: int) -> Iterator[dict[str, Any]]:
    for members in best_fit([len(ids) for ids, _ in window], row_tokens):
        ids = np.concatenate([window[member][0] for member in members])
        yield {
            "input_ids": ids.tolist(),
            "attention_mask": [1] * len(ids),
            "labels": np.concatenate([window[member][1] for member in members]).tolist(),
            "position_ids": np.concatenate([np.arange(len(window[member][0])) for member in members]).tolist(),
        }
