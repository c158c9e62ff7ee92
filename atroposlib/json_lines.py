"""Lines of JSONL files, split alike by everybody and read also where they are not quite JSON; objects in files.

`to_json` takes what authors' code gives: scores, items and errors come from outside. It is orjson where that can, and
makes the rest fit: a number beyond 64 bits becomes its decimal text, half of a surrogate pair U+FFFD, tensors and sets
become lists, what holds itself becomes "..." there; whatever else is no JSON, also as a key, becomes its text.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import orjson

from atroposlib.type_definitions import Json, JsonObject

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


def read_leniently(data: bytes) -> Json:
    r"""The value of a line as Python's parser takes it, with null for numbers that are not finite.

    Half a surrogate pair stays one; a byte that is no UTF-8 becomes one of U+DC80 to U+DCFF.

    Raises:
        ValueError: not even that parser takes it. RecursionError: too deep.

    >>> read_leniently(rb'{"scores": [NaN, 1e999], "text": "\ud83d"}')
    {'scores': [None, None], 'text': '\ud83d'}
    """
    text = data.decode(errors="surrogateescape")
    check_depth(text)
    return json.loads(text, parse_constant=lambda name: None, parse_float=_finite_or_none)


def strict_json(value: object) -> bytes:
    """Return what `read_leniently` gave as JSON that every parser takes: U+FFFD in place of broken text."""
    return LONE_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)).encode()


def parse_anyhow(data: bytes) -> Json:
    """The value of a line for people to look at; what is broken in it is shown as null or U+FFFD.

    ValueError, RecursionError: as `read_leniently`.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return orjson.loads(strict_json(read_leniently(data)))


def object_in(data: bytes) -> JsonObject | None:
    """The JSON object that a line or a file holds, also with NaN in it; None when it holds none."""
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        check_depth(text)
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_object(path: Path) -> JsonObject | None:
    """The JSON object in a file; None when it cannot be read or holds none."""
    try:
        return object_in(path.read_bytes())
    except OSError:
        return None


def check_depth(text: str) -> None:
    """RecursionError beyond a depth of our own; the parser of each Python has another."""
    if text.count("[") + text.count("{") <= _DEEPEST_READ:
        return
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        depth += _STEP.get(found[0], 0)
        if depth > _DEEPEST_READ:
            raise RecursionError(f"nested more than {_DEEPEST_READ} levels deep")


_DEEPEST_READ = 500  # Python 3.11 reads 1,000 less what stands on its stack
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_STEP = {"[": 1, "{": 1, "]": -1, "}": -1}


def _finite_or_none(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_DEEPEST = 200  # orjson refuses what is nested 254 levels deep


def jsonable(value: object) -> object:
    """Tensors and other array-likes as lists, sets as lists, everything else as text."""
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        return to_list()
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("latin-1")
    model_dump = getattr(value, "model_dump", None)
    return model_dump() if callable(model_dump) else str(value)


def to_json(value: object, default: Callable[[object], object] = jsonable) -> bytes:
    """`value` on one line, without a newline. `default` makes something simpler of what is no JSON.

    >>> to_json({"factorial": 10**20, (1, 2): {3}})
    b'{"factorial":"100000000000000000000","(1, 2)":[3]}'
    """
    try:
        return orjson.dumps(value, default=default, option=_OPTIONS)
    except TypeError:
        return orjson.dumps(_fit(value, default, ()), option=_OPTIONS)


def as_json(value: object) -> Json:
    """`value` as it will be read again."""
    return orjson.loads(to_json(value))


def _fit(value: object, default: Callable[[object], object], above: tuple[int, ...]) -> object:
    """`value` without what orjson refuses; `above` are the ids of what holds it."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if id(value) in above or len(above) > _DEEPEST:
        return "..."
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return {_fit_key(key): _fit(each, default, above) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_fit(each, default, above) for each in value]
    return _fit(default(value), default, above)


def _fit_key(key: object) -> object:
    is_plain = key is None or isinstance(key, bool | int | float)
    return _fit(key if is_plain else str(key), str, ())
