"""Schema following: turn a text into an object that a pydantic model accepts, in JSON, YAML or TOML.

python environments/pydantic_schema_following_environment/pydantic_schema_following_environment.py process
"""

import json
import random
import re
import tomllib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, TypedDict

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, create_model

from atroposlib.environments.intern_bootcamp.words import WORDS
from atroposlib.environments.rows import Row
from atroposlib.environments.single_turn import THINK, RowsConfig, RowsEnv
from atroposlib.environments.structured import read_json, read_yaml
from atroposlib.type_definitions import JsonObject


class StructuredOutputFormat(Enum):
    """In which language the object is written."""

    JSON = "json"
    YAML = "yaml"
    TOML = "toml"


class OutputContainerFormat(Enum):
    """Text around it."""

    TAGGED = "tagged"
    NONE = "none"
    MARKDOWN = "markdown"


_LOADERS: Mapping[str, Callable[[str], Any]] = {"json": read_json, "yaml": read_yaml, "toml": tomllib.loads}
_AROUND = {"tagged": ("<{0}>", "</{0}>"), "none": ("", ""), "markdown": ("```{0}", "```")}
KINDS = ("integer", "number", "string", "boolean", "choice", "list")


class Wanted(TypedDict):
    """One field of the model."""

    name: str
    kind: str  # one of KINDS
    value: Any  # what the text says
    choices: list[str]  # of a choice


class Task(TypedDict):
    """One problem."""

    model: str
    fields: list[Wanted]
    language: str
    container: str


class PydanticEnvConfig(RowsConfig):
    """The size of the models, and the forms in which objects are asked for."""

    levels: list[PositiveInt] = Field(
        default=[1, 2, 3], min_length=1, description="Difficulties: 2 fields and 2 more for each, each as often."
    )
    dataset: str | None = Field(
        default=None, description="A .jsonl or .parquet file of items as this environment makes them; null: made."
    )
    allowed_structured_formats: list[StructuredOutputFormat] = Field(
        default=list(StructuredOutputFormat), min_length=1, description="Languages, each as often."
    )
    allowed_container_formats: list[OutputContainerFormat] = Field(
        default=list(OutputContainerFormat), min_length=1, description="What stands around the object, each as often."
    )
    eval_problems: int | None = Field(default=64, description="Problems of an evaluation; null: all rows.")


class PydanticSchemaFollowingEnv(RowsEnv):
    """Score 1.0 for an object that the model accepts and that holds what the text says, else 0.0."""

    name = "pydantic_schema_following"
    env_config_cls = PydanticEnvConfig
    config: PydanticEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    system = THINK + "write the object in the form that is asked for, and nothing else."
    wanted = 'an object with the fields "model", "fields", "language" and "container"'

    def make(self, rng: random.Random, level: int) -> Task:
        names = rng.sample(WORDS, k=2 + 2 * level)
        return Task(
            model=rng.choice(WORDS).capitalize(),
            fields=[_draw(rng, name) for name in names],
            language=rng.choice(self.config.allowed_structured_formats).value,
            container=rng.choice(self.config.allowed_container_formats).value,
        )

    @classmethod
    def to_item(cls, row: Row) -> Task:
        item = Task(**{name: row[name] for name in Task.__annotations__})  # pyright: ignore[reportArgumentType]
        accepting(item).model_validate({field["name"]: field["value"] for field in item["fields"]})
        return item

    def question(self, item: Task) -> str:
        schema = json.dumps(accepting(item).model_json_schema(), indent=1)
        facts = ". ".join(f"The {field['name']} is {_in_words(field['value'])}" for field in item["fields"])
        start, end = (mark.format(item["language"]) for mark in _AROUND[item["container"]])
        around = f", between {start} and {end}" if start else ""
        return f"{facts}.\n\nWrite this as {item['language'].upper()}{around}, such that it fits this schema:\n{schema}"

    def grade(self, said: str, item: Task) -> float:
        start, end = (mark.format(item["language"]) for mark in _AROUND[item["container"]])
        if not said.startswith(start) or not said.endswith(end) or len(said) < len(start) + len(end):
            return 0.0
        try:
            loaded = _LOADERS[item["language"]](said[len(start) : len(said) - len(end)].strip())
            given = accepting(item).model_validate(loaded)
        except (ValueError, ValidationError, yaml.YAMLError, RecursionError):
            return 0.0
        return float(all(getattr(given, field["name"]) == field["value"] for field in item["fields"]))

    def gold(self, item: Task) -> str:
        return self._written(item, {field["name"]: field["value"] for field in item["fields"]}, None)

    def other_spelling(self, item: Task) -> str:
        return self._written(item, {field["name"]: field["value"] for field in reversed(item["fields"])}, 2)

    def _written(self, item: Task, values: JsonObject, indent: int | None) -> str:
        start, end = (mark.format(item["language"]) for mark in _AROUND[item["container"]])
        if item["language"] == "yaml":
            text = yaml.safe_dump(values, sort_keys=False, default_flow_style=bool(indent)).strip()
        elif item["language"] == "toml":
            text = ("\n" if indent is None else "\n\n").join(
                f"{name} = {json.dumps(value)}" for name, value in values.items()
            )
        else:
            text = json.dumps(values, indent=indent)
        return f"{start}\n{text}\n{end}".strip()


def accepting(item: Task) -> type[BaseModel]:
    """Return the pydantic model of a problem: strict kinds, no other fields."""
    kinds: dict[str, Any] = {"integer": int, "number": float, "string": str, "boolean": bool, "list": list[str]}
    fields: dict[str, Any] = {}
    for field in item["fields"]:
        kind = Literal[tuple(field["choices"])] if field["kind"] == "choice" else kinds[field["kind"]]
        fields[field["name"]] = (kind, ...)
    return create_model(item["model"], __config__=ConfigDict(extra="forbid", strict=True), **fields)


def _draw(rng: random.Random, name: str) -> Wanted:
    kind, words = rng.choice(KINDS), rng.sample(WORDS, k=3)
    values = {
        "integer": rng.randint(2, 999),
        "number": rng.randint(1, 999) + 0.5,
        "string": " ".join(words[:2]),
        "boolean": rng.random() < 0.5,
        "choice": rng.choice(words),
        "list": words,
    }
    return Wanted(name=name, kind=kind, value=values[kind], choices=words if kind == "choice" else [])


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        return "a list: " + ", ".join(value)
    return json.dumps(value) if not isinstance(value, str) else re.sub(r"\s+", " ", value)


if __name__ == "__main__":
    PydanticSchemaFollowingEnv.cli()
