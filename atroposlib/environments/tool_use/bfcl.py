"""Reads the sets of the Berkeley Function-Calling Leaderboard (BFCL v4) from where the package `bfcl-eval` lies.

The package is found by its path and not imported; a folder of the same files does as well. Nothing of it is kept here.
"""

import ast
import importlib.util
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, TypeVar

from atroposlib.environments.rows import order
from atroposlib.environments.tool_use.answers import fault_of
from atroposlib.errors import ConfigError, DataError
from atroposlib.paths import expand_path
from atroposlib.type_definitions import Json, JsonObject

T = TypeVar("T")
logger = logging.getLogger(__name__)

SetName = Literal[
    "simple",
    "multiple",
    "parallel",
    "parallel_multiple",
    "irrelevance",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_irrelevance",
    "live_relevance",
]
INSTALLED = "bfcl"
"""As a name of a data set: the files of the installed package."""
_FILES = {"simple": "simple_python"}
_SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
_SCHEMA_KEYS = ("type", "description", "enum", "default", "required")


class ToolProblem(TypedDict):
    """One problem of a single turn; `answers` is empty where no function fits, None where any of them may be called."""

    id: str
    set: str
    messages: list[JsonObject]
    functions: list[JsonObject]
    answers: list[JsonObject] | None


class MadeCall(TypedDict):
    """A call of a function: name and values, as a right solution or an episode makes it."""

    name: str
    arguments: JsonObject
    positional: NotRequired[list[Any]]


def data_folder(dataset: str) -> Path:
    """Return the folder of the files: the installed package's for `bfcl`, else the folder that is named.

    Raises:
        ConfigError: it is not there.
    """
    if dataset != INSTALLED:
        folder = expand_path(dataset, what="env.dataset")
        if not folder.is_dir():
            raise ConfigError(f"env.dataset {folder} is no folder; name one with files BFCL_v4_*.json, or {INSTALLED}")
        return folder
    return package_folder() / "data"


def package_folder() -> Path:
    """Return where `bfcl_eval` is installed; ConfigError where it is not."""
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise ConfigError("BFCL's files are not installed; run: pip install --no-deps bfcl-eval, or name their folder")
    return Path(spec.origin).parent


def read_problems(folder: Path, names: Iterable[SetName]) -> list[ToolProblem]:
    """Return the problems of some sets, mixed; those that no call answers, as their data are at odds, are left out.

    Raises:
        ConfigError: a file is missing.
        DataError: a file is another.
    """
    found = [problem for name in names for problem in _of_set(folder, name)]
    broken = [problem["id"] for problem in found if problem["answers"] and not _is_solvable(problem)]
    if broken:
        logger.warning("problems of BFCL that no call answers are left out: %s", ", ".join(broken))
    return mixed([problem for problem in found if problem["id"] not in broken])


def mixed(items: Sequence[T]) -> list[T]:
    """Return the items in another order, always the same: their first ones then stand for all."""
    return [items[place] for place in order(len(items), INSTALLED)]


def _is_solvable(problem: ToolProblem) -> bool:
    calls = [(call["name"], call["arguments"]) for call in right_calls(problem)]
    return fault_of(calls, problem["functions"], problem["answers"] or ()) is None


def _of_set(folder: Path, name: SetName) -> list[ToolProblem]:
    file = f"BFCL_v4_{_FILES.get(name, name)}.json"
    rows = read_lines(folder / file)
    answers: JsonObject = {}
    others = None if name == "live_relevance" else []
    if not name.endswith("relevance"):
        answers = {row["id"]: row["ground_truth"] for row in read_lines(folder / "possible_answer" / file)}
    try:
        return [
            ToolProblem(
                id=row["id"],
                set=name,
                messages=row["question"][0],
                functions=row["function"],
                answers=answers[row["id"]] if answers else others,
            )
            for row in rows
        ]
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(f"{folder / file} has a row that is no problem of BFCL v4: {error!r}") from error


def read_lines(path: Path) -> list[JsonObject]:
    """Return the JSON objects of a file, one a line; errors as of `read_problems`."""
    try:
        return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); is this the data folder of BFCL v4?") from error
    except ValueError as error:
        raise DataError(f"{path} has a line that is no JSON: {error}") from error


def tool_of(function: Mapping[str, Json]) -> JsonObject:
    """Return a function of BFCL as a tool of OpenAI's chat completions."""
    said = {"name": function["name"], "description": function.get("description", "")}
    return {"type": "function", "function": {**said, "parameters": _schema(function["parameters"])}}


def _schema(declared: Mapping[str, Json]) -> JsonObject:
    made = {key: declared[key] for key in _SCHEMA_KEYS if key in declared}
    made["type"] = _SCHEMA_TYPES.get(declared.get("type", "any"), declared.get("type", "string"))
    if "properties" in declared:
        made["properties"] = {name: _schema(value) for name, value in declared["properties"].items()}
    if isinstance(declared.get("items"), dict):
        made["items"] = _schema(declared["items"])
    return made


def right_calls(problem: ToolProblem) -> list[MadeCall]:
    """Return calls of the possible answers, with their first values; what may be left out is."""
    if problem["answers"] is None:
        return [{"name": problem["functions"][0]["name"], "arguments": {}}]
    needed = {function["name"]: function["parameters"].get("required", ()) for function in problem["functions"]}
    pairs = [pair for answer in problem["answers"] for pair in answer.items()]
    return [{"name": name, "arguments": _first_values(allowed, needed.get(name, ()))} for name, allowed in pairs]


def _first_values(allowed: Mapping[str, Sequence[Any]], needed: Iterable[str] = ()) -> JsonObject:
    kept = {key: values for key, values in allowed.items() if "" not in values or key in needed}
    return {key: _one(next((value for value in values if value != ""), "")) for key, values in kept.items()}


def _one(value: Any) -> Any:
    """Return a value that an answer allows; dicts have lists of values inside."""
    if isinstance(value, dict):
        return _first_values(value) if all(isinstance(each, list) for each in value.values()) else value
    return [_one(each) for each in value] if isinstance(value, list) else value


def call_of(source: str) -> MadeCall:
    """Return a call that is written as Python; DataError where it is none of plain values.

    >>> call_of("cp('a', destination='b')")
    {'name': 'cp', 'arguments': {'destination': 'b'}, 'positional': ['a']}
    """
    try:
        tree = ast.parse(source, mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
            raise ValueError("no call of a name")
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
        return {"name": tree.func.id, "arguments": arguments, "positional": [*map(ast.literal_eval, tree.args)]}
    except (ValueError, SyntaxError) as error:
        raise DataError(f"{source!r} is no call with plain values: {error}") from error
