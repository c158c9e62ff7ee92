"""One call of a tool as a model writes it: name and arguments, read from JSON or from values that are plain text."""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from atroposlib.type_definitions import Json, JsonObject
from atroposlib.utils.tool_call_parser import parse_lenient_object

Tools = Sequence[Mapping[str, Json]]


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One call as the model wrote it."""

    name: str
    arguments: str  # JSON text
    id: str | None = None  # where the model gives one itself


def escaped(text: str) -> str:
    """`text` with half a surrogate pair, which no reply can carry, as JSON's escape for it."""
    return text.encode("utf-8", "backslashreplace").decode()


def json_call(text: str, *keys: str) -> WrittenCall | None:
    """Return a call that is a JSON object with `name` and one of the keys for its arguments."""
    value = parse_lenient_object(text.strip())
    if value is None or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[key] for key in keys if key in value), {})
    given = value.get("id")
    return written_call(value["name"], arguments, given if isinstance(given, str) else None)


def written_call(name: str, arguments: object, call_id: str | None = None) -> WrittenCall | None:
    try:
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # a Python literal may hold sets, bytes and numbers of any length
        return None
    return WrittenCall(escaped(name.strip()), escaped(written), call_id)


def json_text_call(name: str, text: str, call_id: str | None = None) -> WrittenCall | None:
    arguments = parse_lenient_object(text.strip())
    return None if arguments is None or not name.strip() else written_call(name, arguments, call_id)


def json_values(text: str) -> Iterator[tuple[Json, int]]:
    """JSON values that stand one behind the other, each with where it ends; ValueError at anything else."""
    decoder, at = json.JSONDecoder(strict=False), 0
    while (begin := at + len(text[at:]) - len(text[at:].lstrip(" \n\t;,"))) < len(text):
        value, at = decoder.raw_decode(text, begin)
        yield value, at


def python_call(node: ast.expr) -> WrittenCall | None:
    """A call as an expression of Python, None where it is no plain one; ValueError for values that are no literals."""
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return None
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return written_call(ast.unparse(node.func), arguments)


def arguments_of(call: WrittenCall) -> JsonObject | str:
    """Return the arguments as a value; text that is no JSON object as it is."""
    value = parse_lenient_object(call.arguments)
    return call.arguments if value is None else value


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def typed_call(
    name: str, values: Mapping[str, str], tools: Tools, *, is_text: Mapping[str, bool] | None = None
) -> WrittenCall | None:
    """Return a call whose values are plain text: the schema of the tool says what they are.

    Where it allows text and something else, the something else comes first; where it says nothing, JSON does.
    """
    schema = _schema_of(name, tools)
    told = is_text or {}
    words = {key: _word(value, schema.get(key)) for key, value in values.items()}
    arguments = {key: word if told.get(key) else _value(word, schema.get(key)) for key, word in words.items()}
    return written_call(name, arguments)


def _word(text: str, schema: object) -> str:
    """Return the text without white space where that makes it one of the words that the schema has."""
    words = schema.get("enum") if isinstance(schema, Mapping) else None
    return text.strip() if isinstance(words, list) and text not in words and text.strip() in words else text


def _value(text: str, schema: object) -> Json:
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    return text if "string" in kinds and not kinds & _KINDS_OF.get(type(value), set()) else value


_KINDS_OF: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


def _kinds(schema: object) -> set[str]:
    """Return the JSON types that a schema allows."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind or ())
    for choice in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        kinds |= _kinds(choice)
    return kinds | ({"string"} if all(isinstance(value, str) for value in schema.get("enum", [None])) else set())


def _schema_of(name: str, tools: Tools) -> Mapping[str, Json]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def as_text(value: object) -> str:
    return value if isinstance(value, str) else dumped(value)


def items_of(call: WrittenCall) -> list[tuple[str, Json]]:
    value = arguments_of(call)
    return list(value.items()) if isinstance(value, dict) else []
