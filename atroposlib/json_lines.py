"""Lines of JSONL files: split alike by everybody, and read also where they are not quite JSON."""

import json
import math
import re
from typing import Any

import orjson

_SEPARATORS = {"\x85".encode(): rb"\u0085", "\u2028".encode(): rb"\u2028", "\u2029".encode(): rb"\u2029"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def one_line(data: bytes) -> bytes:
    r"""The same JSON, with an escape for each character at which `str.splitlines` breaks, but readers of JSONL do not.

    Models write them; upstream's files were ASCII, so code that splits text with `splitlines` has always worked.

    >>> one_line('"a\u2028b"\n'.encode())
    b'"a\\u2028b"\n'
    """
    if data.isascii():
        return data
    for raw, escape in _SEPARATORS.items():
        if raw[-1] in data and raw in data:  # one byte is looked for a hundred times faster than three
            data = data.replace(raw, escape)
    return data


def read_leniently(data: bytes) -> Any:
    r"""The value of a line as Python's parser takes it, with null for numbers that are not finite.

    Half a surrogate pair stays one; a byte that is no UTF-8 becomes one of U+DC80 to U+DCFF.

    Raises:
        ValueError: not even that parser takes it. RecursionError: too deep.

    >>> read_leniently(rb'{"scores": [NaN, 1e999], "text": "\ud83d"}')
    {'scores': [None, None], 'text': '\ud83d'}
    """
    return json.loads(
        data.decode(errors="surrogateescape"), parse_constant=lambda name: None, parse_float=_finite_or_none
    )


def strict_json(value: Any) -> bytes:
    """What `read_leniently` gave as JSON that every parser takes: U+FFFD in place of broken text."""
    return LONE_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)).encode()


def parse_anyhow(data: bytes) -> Any:
    """The value of a line for people to look at; what is broken in it is shown as null or U+FFFD.

    Raises:
        ValueError, RecursionError: as `read_leniently`.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return orjson.loads(strict_json(read_leniently(data)))


def _finite_or_none(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None
