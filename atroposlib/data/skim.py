"""Finds the lists of numbers in a rollout line without parsing them.

Token ids, masks and log-probabilities are nine tenths of a line, and choosing responses needs none of them. Between
`"tokens":[[` and the next quote there are only numbers, so the end of such a list is found by looking for one byte,
at the speed of memory. The numbers themselves are not checked here; who uses them decodes them.
"""

import re
from typing import NamedTuple

_KEY = re.compile(rb"\w+")
_LONGEST_KEY = 64
_AFTER_A_LIST = b", }\r\n"
_ENOUGH = 0.8  # of a line: to decode the rest costs less than to search it
_MARK = b"-1.0000000001e-"  # starts a number that no rollout file holds


class Skimmed(NamedTuple):
    """One line, taken apart."""

    rest: bytes  # the line's JSON; in place of each cut list stands a list of one number, see `cut_number`
    lists: list[tuple[int, int]]  # where the cut lists start and end in `data`
    hole: tuple[int, int]  # likewise, the longest stretch of neighbouring ones


def cut_number(value: bytes) -> int | None:
    """Which cut list the number `value` of `Skimmed.rest` stands for; None when it is one of the line's own."""

    return int(value.removeprefix(_MARK)) if value.startswith(_MARK) else None


def skim(data: bytes, first: int, last: int) -> Skimmed:
    """Cut the nested lists without strings out of the JSON object at `first` to `last` of `data`, until little is left.

    A quote that follows a word and precedes `:[[` closes a key, whatever stands before it, so text that looks like
    a list is never cut. What is laid out in other ways, or small, is left in place.
    """
    view = memoryview(data)
    opening = b": [[" if b'": ' in data[first : first + _LONGEST_KEY] else b":[["
    pieces: list[bytes | memoryview] = []
    lists: list[tuple[int, int]] = []
    hole = stretch = (first, first)
    kept = at = first
    while hole[1] - hole[0] < _ENOUGH * (last - first) and (colon := data.find(opening, at, last)) >= 0:
        start = colon + len(opening) - 2
        at = start + 2
        key = data.rfind(b'"', max(first, colon - _LONGEST_KEY), colon - 1)
        if data[colon - 1] != ord('"') or key < 0 or not _KEY.fullmatch(data, key + 1, colon - 1):
            continue
        quote = data.find(b'"', start, last)
        quote = last if quote < 0 else quote
        end = data.rfind(b"]]", start, quote) + 2
        if end < 2 or data[end:quote].strip(_AFTER_A_LIST):
            continue
        follows = bool(lists) and not data[kept:key].strip(b", ")
        stretch = (stretch[0] if follows else start, end)
        hole = max(hole, stretch, key=lambda each: each[1] - each[0])
        pieces += [view[kept:start], b"[%b%d]" % (_MARK, len(lists))]
        lists.append((start, end))
        kept = at = end
    return Skimmed(b"".join([*pieces, view[kept:last]]), lists, hole)


def split_rows(data: bytes, start: int, end: int) -> list[memoryview]:
    """The JSON of each row of the list of flat lists at `start` to `end` of `data`.

    Raises:
        ValueError: there is something else.
    """
    view = memoryview(data)
    rows: list[memoryview] = []
    at = start + 1
    while True:
        after = data.find(b"]", at) + 1
        rows.append(view[at:after])
        at = data.find(b"[", after, end)
        if at < 0:
            break
        if data[after:at].strip() != b",":
            raise ValueError(f"something stands between the lists at byte {after}")
    if data[after : end - 1].strip():
        raise ValueError(f"something follows the list at byte {after}")
    return rows
