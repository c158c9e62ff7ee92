"""Proves that a piece of JSON text is a matrix of good numbers, without making a single Python number.

`[[12, 7], [3, 4]]` with 100,000 numbers costs a JSON parser 2 ms. Here the text becomes one bit per character for each
class of characters (digits, commas, ...), and the grammar becomes a few operations on those bits, 64 characters at a
time: which class may follow which, and where a run of digits ends that began after a point. The method is that of
"Parsing Gigabytes of JSON per Second" (arXiv:1902.08318), with numpy instead of vector instructions.

Only the usual spacing (`,` or `, `) and usual numbers are understood. Everything else is in doubt, not wrong: a reader
that can name what is wrong has to look at it.
"""

from dataclasses import dataclass

import numpy as np

_CHUNK = 1 << 18  # characters; temporaries of this size stay in the cache, larger ones are page faults
_WORD = 64
_FULL = np.uint64(2**_WORD - 1)


def proven_rows(text: memoryview, *, integers: bool, signed: bool = True) -> list[int] | None:
    """Row lengths `[G]` if `text` surely is a matrix `[G][T]` of good numbers without empty rows; None when in doubt.

    Args:
        text: from the first `[` to the last `]`.
        integers: integers of at most 7 digits are good; else finite floats.
        signed: a minus is good.
    """
    codes = np.frombuffer(text, np.uint8)
    marks = {"comma": ",", "space": " "}
    if signed:
        marks["minus"] = "-"
    if not integers:
        marks |= {"point": ".", "exponent": "e"}
    bits = _classify(codes, marks)
    rows = _find_rows(codes, bits)
    if rows is None or not _is_grammatical(bits) or _has_long_run(bits.digit, integers):
        return None
    return [int(np.count_nonzero(codes[start:end] == ord(","))) + 1 for start, end in rows.tolist()]


@dataclass(slots=True)
class _Bits:
    """One bit per character and class, the first character lowest; `zero` is a part of `digit`.

    `opening` and `closing` are the brackets of rows, not those around the matrix.
    """

    digit: np.ndarray
    zero: np.ndarray
    comma: np.ndarray
    space: np.ndarray
    minus: np.ndarray
    point: np.ndarray
    exponent: np.ndarray
    opening: np.ndarray
    closing: np.ndarray


def _classify(codes: np.ndarray, marks: dict[str, str]) -> _Bits:
    """Look at the text once, in pieces that fit the cache; brackets are left to `_find_rows`."""
    maps = {name: np.zeros(-(-codes.size // _WORD), np.uint64) for name in _Bits.__slots__}
    values, mask = np.empty(_CHUNK, np.uint8), np.empty(_CHUNK, np.bool_)
    for start in range(0, codes.size, _CHUNK):
        chunk = codes[start : start + _CHUNK]
        value, found = np.subtract(chunk, ord("0"), out=values[: chunk.size]), mask[: chunk.size]
        _set_bits(maps["digit"], start, np.less(value, 10, out=found))
        _set_bits(maps["zero"], start, np.equal(value, 0, out=found))
        for name, mark in marks.items():
            _set_bits(maps[name], start, np.equal(chunk, ord(mark), out=found))
    return _Bits(**maps)


def _set_bits(bitmap: np.ndarray, start: int, mask: np.ndarray) -> None:
    packed = np.packbits(mask, bitorder="little")
    bitmap.view(np.uint8)[start // 8 : start // 8 + packed.size] = packed


def _find_rows(codes: np.ndarray, bits: _Bits) -> np.ndarray | None:
    """`[G][2]` positions of the brackets around rows, which are noted in `bits`.

    None when other characters occur, brackets nest otherwise, or rows are not set apart by `,` or `, `.
    """
    places = _unclassified(codes.size, bits)
    if places.size < 4 or places.size % 2 or places[1] != 1 or places[-2] != codes.size - 2:
        return None
    rows = places[1:-1].reshape(-1, 2)
    (opening, closing), gaps = rows.T, rows[1:, 0] - rows[:-1, 1]
    if (
        (codes[0], codes[-1]) != (ord("["), ord("]"))
        or (codes[opening] != ord("[")).any()
        or (codes[closing] != ord("]")).any()
        or (codes[closing[:-1] + 1] != ord(",")).any()
        or not ((gaps == 2) | ((gaps == 3) & (codes[opening[1:] - 1] == ord(" ")))).all()
    ):
        return None
    for bitmap, positions in ((bits.opening, opening), (bits.closing, closing)):
        np.bitwise_or.at(bitmap, positions // _WORD, np.uint64(1) << (positions % _WORD).astype(np.uint64))
    return rows


def _unclassified(size: int, bits: _Bits) -> np.ndarray:
    """Positions of the characters in no class."""
    other = ~(bits.digit | bits.comma | bits.space | bits.minus | bits.point | bits.exponent)
    if size % _WORD:
        other[-1] &= np.uint64(2 ** (size % _WORD) - 1)
    words = np.flatnonzero(other)
    places = np.flatnonzero(np.unpackbits(other[words].view(np.uint8), bitorder="little"))
    return words[places // _WORD] * _WORD + places % _WORD


def _is_grammatical(bits: _Bits) -> bool:
    """Whether every character may follow the one before it, and the parts of every number come in order."""
    digit, minus, point, exponent = bits.digit, bits.minus, bits.point, bits.exponent
    after_digit, after_exponent = _after(digit), _after(exponent)
    at_value = _after(bits.comma | bits.space | bits.opening)
    wrong = (bits.comma & ~(after_digit | _after(bits.closing))) | (bits.space & ~_after(bits.comma))
    wrong |= ((point | exponent | bits.closing) & ~after_digit) | (minus & ~(at_value | after_exponent))
    wrong |= after_exponent & ~minus  # a number above 1 could be infinite
    wrong |= digit & ~(after_digit | at_value | _after(minus | point))
    starts_number = digit & (at_value | _after(minus & ~after_exponent))
    wrong |= _after(starts_number & bits.zero) & digit
    if point.any():
        wrong |= _ends_of_runs(digit & _after(point), digit) & point
    if exponent.any():
        wrong |= _ends_of_runs(digit & _after(minus & after_exponent), digit) & (point | exponent)
    return not wrong.any()


def _after(bitmap: np.ndarray, distance: int = 1) -> np.ndarray:
    """The characters `distance` after those of a bitmap."""
    moved = bitmap << np.uint64(distance)
    moved[1:] |= bitmap[:-1] >> np.uint64(_WORD - distance)
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
    for length in (1, 2, 4):
        run = run & _after(run, length)
    return bool(run.any())
