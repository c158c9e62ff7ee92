"""Proves that a piece of JSON text is a matrix of good numbers, without making a single Python number.

`[[12, 7], [3, 4]]` with 100,000 numbers costs a JSON parser 2 ms. Here the text becomes one bit per character for each
class of characters (digits, commas, ...), and the grammar becomes a few operations on those bits, 64 characters at a
time: what may follow what, and where a run of digits ends. The method is that of "Parsing Gigabytes of JSON per
Second" (arXiv:1902.08318), with numpy instead of vector instructions.

Only the usual spacing (`,` or `, ` throughout) and usual numbers are understood. Everything else is in doubt, not
wrong: a reader that can name what is wrong has to look at it.
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

_CHUNK = 1 << 20  # characters; temporaries of this size stay in the cache
_WORD = 64
_FULL = np.uint64(2**_WORD - 1)
_ONE, _BITS = np.uint64(1), np.uint64(_WORD)
_BRACKETS = np.frombuffer(b"[]", np.uint8)

_Bits: TypeAlias = Mapping[str, np.ndarray]
"""One bit per character for each class, the first character lowest: marks, `digit`, and `nonzero` (all but 0)."""


def proven_rows(text: memoryview, *, integers: bool, signed: bool = True) -> list[int] | None:
    """Row lengths `[G]` if `text` surely is a matrix `[G][T]` of good numbers without empty rows; None when in doubt.

    Args:
        text: from the first `[` to the last `]`.
        integers: integers of at most 7 digits are good; else finite floats.
        signed: integers may have a minus; floats always may.
    """
    if len(text) < 4 or text[0] != ord("[") or text[-1] != ord("]"):
        return None
    codes = np.frombuffer(text[1:-1], np.uint8)
    bits = _classify(codes, ", -.e" if not integers else ", -" if signed else ", ")
    spaced = bool(bits[" "].any())
    rows = _find_rows(codes, bits, spaced)
    if rows is None or not _is_grammatical(bits, rows[:, 0], spaced) or _has_long_run(bits["digit"], integers):
        return None
    return _count_values(bits[","], rows[:, 0])


def _classify(codes: np.ndarray, marks: str) -> _Bits:
    """Look at the text once; brackets are left to `_find_rows`."""
    size = min(_CHUNK, _padded(codes.size))
    values, mask = np.empty(size, np.uint8), np.empty(size, np.bool_)
    packed: dict[str, list[np.ndarray]] = {name: [] for name in ("nonzero", "digit", *marks)}
    for start in range(0, codes.size, _CHUNK):
        chunk = codes[start : start + _CHUNK]
        end, padded = chunk.size, _padded(chunk.size)
        values[end:padded], mask[end:padded] = 0, False
        np.subtract(chunk, ord("0"), out=values[:end])
        packed["nonzero"].append(_pack(values[:padded]))
        np.less(values[:end], 10, out=mask[:end])
        packed["digit"].append(_pack(mask[:padded]))
        for mark in marks:
            np.equal(chunk, ord(mark), out=mask[:end])
            packed[mark].append(_pack(mask[:padded]))
    return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in packed.items()}


def _padded(size: int) -> int:
    return -(-size // _WORD) * _WORD


def _pack(mask: np.ndarray) -> np.ndarray:
    return np.packbits(mask, bitorder="little").view(np.uint64)


def _find_rows(codes: np.ndarray, bits: _Bits, spaced: bool) -> np.ndarray | None:
    """`[G][2]` positions of the brackets around rows.

    None when other characters occur, brackets nest otherwise, or more or less than a separator is between rows.
    """
    places = _unclassified(codes.size, bits)
    if places.size < 2 or places.size % 2 or places[0] != 0 or places[-1] != codes.size - 1:
        return None
    rows = places.reshape(-1, 2)
    ends = rows[:-1, 1]
    good = (codes[rows] == _BRACKETS).all() and (codes[ends + 1] == ord(",")).all()
    return rows if good and (rows[1:, 0] == ends + (2 + spaced)).all() else None


def _unclassified(size: int, bits: _Bits) -> np.ndarray:
    """Positions of the characters in no class."""
    known = bits["digit"] | bits[","]
    for mark in " -.e":
        if mark in bits:
            known |= bits[mark]
    if size % _WORD:
        known[-1] |= _FULL << np.uint64(size % _WORD)
    words = (known != _FULL).nonzero()[0]
    places = np.unpackbits((~known[words]).view(np.uint8), bitorder="little").nonzero()[0]
    return words[places >> 6] * _WORD + (places & 63)


def _is_grammatical(bits: _Bits, opening: np.ndarray, spaced: bool) -> bool:
    """Whether every character may follow the one before it, and the parts of every number come in order.

    What surrounds brackets was seen to by `_find_rows`.
    """
    digit, brackets = bits["digit"], np.zeros_like(bits["digit"])
    np.bitwise_or.at(brackets, opening >> 6, _bit(opening))
    if spaced and (_after(bits[","]) != bits[" "]).any():
        return False
    begins = _after(brackets | bits[" " if spaced else ","])
    asking, good = begins, digit | brackets  # where a digit has to stand, and what may stand there
    if "-" in bits:
        sign = bits["-"] & begins
        asking = begins | _after(sign)
        good |= sign
    first = asking & digit
    wrong = _after(first & ~bits["nonzero"]) & digit
    if "." in bits:
        wrong |= bits["."] & ~_ends_of_runs(first, digit)
        asking |= _after(bits["."])
    if "e" in bits and bits["e"].any():
        begins = _after(bits["e"])
        sign = bits["-"] & begins
        wrong |= begins ^ sign  # a number above 1 could be infinite
        power = _after(sign)
        wrong |= bits["e"] & _ends_of_runs(power & digit, digit)
        asking |= power
        good |= sign
    if "-" in bits:
        asking |= bits["-"]
    wrong |= asking & ~good
    return not wrong.any()


def _bit(position: np.ndarray) -> np.ndarray:
    return _ONE << (position & 63).view(np.uint64)


def _after(bitmap: np.ndarray, distance: np.uint64 = _ONE) -> np.ndarray:
    """The characters `distance` after those of a bitmap."""
    moved = bitmap << distance
    moved[1:] |= bitmap[:-1] >> (_BITS - distance)
    return moved


def _ends_of_runs(starts: np.ndarray, digit: np.ndarray) -> np.ndarray:
    """The characters after the digit runs that begin at `starts`: adding 1 to a run of ones carries to its end."""
    total = starts + digit
    total[1:] += (total < starts)[:-1]
    return total & ~digit


def _has_long_run(digit: np.ndarray, integers: bool) -> bool:
    """Integers: whether 8 digits or more stand in a row. Floats: surely true from 127 on, false below 64."""
    if not integers:
        return bool((digit == _FULL).any())
    run = digit
    for distance in (_ONE, np.uint64(2), np.uint64(4)):
        run = run & _after(run, distance)
    return bool(run.any())


def _count_values(comma: np.ndarray, opening: np.ndarray) -> list[int]:
    """Values of each row: the commas from its bracket to that of the next row, and one for the last row."""
    words = opening >> 6
    counts = np.add.reduceat(np.bitwise_count(comma), words, dtype=np.int64)  # of whole words
    counts[:-1] *= words[1:] > words[:-1]
    earlier = np.bitwise_count(comma[words] & (_bit(opening) - _ONE)).astype(np.int64)
    counts -= earlier
    counts[:-1] += earlier[1:]
    counts[-1] += 1
    return counts.tolist()
