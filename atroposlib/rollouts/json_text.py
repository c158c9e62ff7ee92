"""What authors' code gives, as JSON: orjson where it can, and the rest made fit for it.

Scores, items and errors come from outside. A number beyond 64 bits becomes its decimal text, half of a surrogate pair
becomes U+FFFD, tensors and sets become lists, what holds itself becomes "..." there; whatever else is no JSON, also as
a key, becomes its text.
"""

from collections.abc import Callable, Mapping
from typing import Any

import orjson

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


def as_json(value: Any) -> Any:
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
