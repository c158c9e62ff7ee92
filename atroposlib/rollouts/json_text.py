"""What authors' code gives, as JSON: orjson where it can, and the rest made fit for it.

Scores, items and errors come from outside. A number beyond 64 bits becomes its decimal text, half of a surrogate pair
becomes U+FFFD, tensors and sets become lists; whatever else is no JSON becomes its text.
"""

from collections.abc import Mapping
from typing import Any

import orjson

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1


def to_json(value: object) -> bytes:
    """`value` on one line, without a newline.

    >>> to_json({"factorial": 10**20, 1: {2}})
    b'{"factorial":"100000000000000000000","1":[2]}'
    """
    try:
        return orjson.dumps(value, default=_jsonable, option=_OPTIONS)
    except TypeError:
        return orjson.dumps(_fit(value), default=_fit, option=_OPTIONS)


def as_json(value: Any) -> Any:
    """`value` as it will be read again."""
    return orjson.loads(to_json(value))


def _fit(value: object) -> object:
    """`value` without what orjson refuses."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        return str(value)
    if isinstance(value, Mapping):
        return {_fit(key): _fit(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_fit(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    made = _jsonable(value)
    return made if made is value else _fit(made)


def _jsonable(value: object) -> object:
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
