"""Compares calls of tools with possible answers, by the rules of the Berkeley Function-Calling Leaderboard (BFCL v4).

    fault_of([("weather", {"city": "paris"})], functions, [{"weather": {"city": ["Paris"], "unit": ["celsius", ""]}}])

A possible answer names for each argument the values that are right; "" among them: it may be left out. Texts are
compared without case and without the marks `,./-_*^` and spaces. An integer is taken for a float, except inside of
arrays. A value of the type of the possible answers is taken where the function declares another type.

Source: https://github.com/ShishirPatil/gorilla, berkeley-function-call-leaderboard; Python functions only.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atroposlib.type_definitions import Json

Call = tuple[str, Mapping[str, Json]]
"""Name and arguments."""
Function = Mapping[str, Json]
"""As BFCL declares it: name, description, parameters with types of Python."""
Answer = Mapping[str, Mapping[str, Sequence[Any]]]
"""From the one name of a function to the values that each argument may have."""

TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
_IGNORED = str.maketrans(dict.fromkeys(" ,./-_*^", "") | {"'": '"'})


def fault_of(calls: Sequence[Call], functions: Sequence[Function], answers: Sequence[Answer]) -> str | None:
    """Return what is wrong with calls that should be these answers, in any order; None where nothing is."""
    if len(calls) != len(answers):
        return f"{len(calls)} calls, expected {len(answers)}"
    declared, left = {function["name"]: function for function in functions}, list(calls)
    for answer in answers:
        ((name, allowed),) = answer.items()
        faults = [_fault(call, declared[name], allowed) for call in left]
        if None not in faults:
            return "; ".join(str(fault) for fault in faults)
        left.pop(faults.index(None))
    return None


def _fault(call: Call, function: Function, allowed: Mapping[str, Sequence[Any]]) -> str | None:
    name, given = call
    if name != function["name"]:
        return f"{name} is called, expected {function['name']}"
    properties = function["parameters"]["properties"]
    for key in function["parameters"].get("required", ()):
        if key not in given:
            return f"{name} needs {key}"
    for key, value in given.items():
        if key not in properties or key not in allowed:
            return f"{name} is given {key}, which it should not be"
        if not is_right(value, properties[key], allowed[key]):
            return f"{key} of {name} is {value!r}, expected one of {list(allowed[key])}"
    missing = [key for key, values in allowed.items() if key not in given and "" not in values]
    return f"{name} is not given {missing[0]}" if missing else None


def is_right(value: Any, declared: Mapping[str, Json], allowed: Sequence[Any]) -> bool:
    """Return whether an argument of this schema has one of the allowed values, and a type that it may have."""
    kind = declared["type"]
    wanted = TYPES[kind]
    inner = TYPES[declared["items"]["type"]] if kind in ("array", "tuple") else None
    if kind == "float" and type(value) is int:
        value = float(value)
    usual = _usual_type(allowed)
    if type(value) is not wanted:
        return type(value) is usual and value in allowed
    if inner is not None and not any(_has_types(value, inner, answer) for answer in allowed):
        return False
    if usual not in (None, wanted):  # the answers are names of variables
        return value in allowed
    if wanted is dict:
        return any(_is_same_dict(value, answer) for answer in allowed if answer != "")
    if inner is dict:
        return any(_are_same_dicts(value, answer) for answer in allowed)
    if wanted is list:
        return _plain_all(value) in [_plain_all(answer) for answer in allowed if isinstance(answer, list | str)]
    return _plain(value) in _plain_all(allowed)


def _usual_type(allowed: Iterable[Any]) -> type | None:
    return next((type(answer) for answer in allowed if answer != ""), None)


def _has_types(values: Sequence[Any], inner: type, answer: Any) -> bool:
    """Return whether all values of an array have the declared type, or that of this answer's."""
    return not isinstance(answer, list) or all(type(value) in (inner, _usual_type(answer)) for value in values)


def _plain(value: Any) -> Any:
    return value.translate(_IGNORED).lower() if isinstance(value, str) else value


def _plain_all(values: Iterable[Any]) -> list[Any]:
    return [_plain(value) for value in values]


def _is_same_dict(given: Any, answer: Any) -> bool:
    """Return whether each key has one of its values; keys that may be left out have "" among them."""
    if not isinstance(given, dict) or not isinstance(answer, dict):
        return False
    is_known = all(key in answer and _plain(value) in _plain_all(answer[key]) for key, value in given.items())
    return is_known and all(key in given or "" in values for key, values in answer.items())


def _are_same_dicts(given: Sequence[Any], answer: Any) -> bool:
    return isinstance(answer, list | str) and len(given) == len(answer) and all(map(_is_same_dict, given, answer))
