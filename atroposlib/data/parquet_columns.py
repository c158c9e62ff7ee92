"""Columns of a parquet file that hold records as they are, whatever keys the next record has.

A parquet column has one type, in which every object has the same keys. Where a message, a tool call or a part of a
content lacks a key that another one has, it is null. Anything else that differs in its keys, and always the arguments
of a call and the definitions of tools, is JSON text: in a common type each would get the keys of all others.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from atroposlib.errors import DataError

_ALWAYS_TEXT = ("arguments", "tools")
_FUNCTIONS = ("function", "function_call")
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Shape:
    """What a place of a record holds over all records."""

    kind: str  # null, bool, int, float, text, list, object; json: objects or lists, written as text
    fields: "dict[str, Shape]" = field(default_factory=dict)  # of an object
    item: "Shape | None" = None  # of a list
    is_open: bool = False  # an object may lack keys that others have

    @property
    def has_json(self) -> bool:
        """True when something in it is to be written as text."""
        inner = [*self.fields.values(), *([self.item] if self.item else [])]
        return self.kind == "json" or any(each.has_json for each in inner)


Columns: TypeAlias = dict[str, Shape]

_NULL, _JSON = Shape("null"), Shape("json")
_SCALARS = {type(None): _NULL, bool: Shape("bool"), int: Shape("int"), float: Shape("float"), str: Shape("text")}


def columns_of(record: dict[str, Any]) -> Columns:
    """The columns of one record."""
    return {name: _shape_of(value, name) for name, value in record.items()}


def merge_columns(left: Columns, right: Columns) -> Columns:
    """Columns for the records of both.

    Raises:
        DataError: a column would need two types.
    """
    if left == right:
        return left
    return _merged_fields(left, right, "")


def fit_columns(record: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """The record with text where its columns hold JSON."""
    return {name: _fit(value, columns[name]) for name, value in record.items()}


def arrow_type(arrow: Any, shape: Shape) -> Any:
    """The type of pyarrow (the module `arrow`) that holds `shape`."""
    if shape.kind == "list":
        return arrow.list_(arrow_type(arrow, shape.item or _NULL))
    if shape.kind == "object":
        return arrow.struct([(name, arrow_type(arrow, each)) for name, each in shape.fields.items()])
    kinds = {"null": arrow.null, "bool": arrow.bool_, "int": arrow.int64, "float": arrow.float64}
    return kinds.get(shape.kind, arrow.string)()


def _shape_of(value: Any, key: str, *, in_list: bool = False) -> Shape:
    if isinstance(value, list):
        return _JSON if key in _ALWAYS_TEXT else Shape("list", item=_item_shape(value, key))
    if isinstance(value, dict):
        is_open = in_list or key in _FUNCTIONS
        try:
            fields = {name: _shape_of(each, name) for name, each in value.items()}
        except DataError:
            if is_open:
                raise
            fields = {}
        return Shape("object", fields, is_open=is_open) if fields and key not in _ALWAYS_TEXT else _JSON
    if type(value) is int and not _LEAST <= value <= _MOST:
        raise DataError(f"{key} is {value}, beyond the 64 bits of a parquet column; write .jsonl instead")
    return _JSON if isinstance(value, str) and key in _ALWAYS_TEXT else _SCALARS[type(value)]


def _item_shape(values: list[Any], key: str) -> Shape:
    kinds = set(map(type, values))
    if kinds <= {bool, float, str, type(None)} or (kinds == {int} and min(values) >= _LEAST and max(values) <= _MOST):
        shapes = [_SCALARS[kind] for kind in kinds]
    else:
        shapes = [_shape_of(value, key, in_list=True) for value in values]
    merged = _NULL
    for shape in shapes:
        merged = _merged(merged, shape, f"{key}[]")
    return merged


def _merged(left: Shape, right: Shape, place: str) -> Shape:
    if left == right or right == _NULL:
        return left
    if left == _NULL:
        return right
    kinds = {left.kind, right.kind}
    if kinds == {"int", "float"}:
        return _SCALARS[float]
    if kinds == {"list"}:
        return Shape("list", item=_merged(left.item or _NULL, right.item or _NULL, f"{place}[]"))
    if kinds == {"object"} and (left.is_open or left.fields.keys() == right.fields.keys()):
        try:
            return Shape("object", _merged_fields(left.fields, right.fields, f"{place}."), is_open=left.is_open)
        except DataError:
            if left.is_open:
                raise
    if kinds <= {"object", "list", "json"}:
        return _JSON
    raise DataError(
        f"these records have no common parquet columns: {place} is {left.kind} in one and {right.kind} in another; "
        "write .jsonl instead"
    )


def _merged_fields(left: Columns, right: Columns, place: str) -> Columns:
    names = dict.fromkeys([*left, *right])
    return {name: _merged(left.get(name, _NULL), right.get(name, _NULL), place + name) for name in names}


def _fit(value: Any, shape: Shape) -> Any:
    if value is None or not shape.has_json:
        return value
    if shape.kind == "json":
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if shape.item is not None:
        return [_fit(each, shape.item) for each in value]
    return {name: _fit(each, shape.fields[name]) for name, each in value.items()}
