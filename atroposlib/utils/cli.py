"""Command-line flags for pydantic settings: `--env.group_size 8`, `--env.group_size=8`, lists, dicts, None.

Values are text until the field they belong to is known; `parse_value` then reads them as that field would.
"""

import difflib
import sys
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError, create_model
from pydantic.fields import FieldInfo

from atroposlib.errors import ConfigError
from atroposlib.type_definitions import Json, JsonObject

Annotation = Any
"""A type annotation, such as `int | None`; typing has no name for the type of them all."""


def split_flags(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Flags with their texts, and what stands before the first flag.

    A flag's values go up to the next `--`; negative numbers are values. A repeated flag collects its values.

    >>> split_flags(["serve", "--env.max_num_workers", "-1", "--slurm=false", "--fresh"])
    ({'env.max_num_workers': ['-1'], 'slurm': ['false'], 'fresh': []}, ['serve'])
    """
    flags: dict[str, list[str]] = {}
    positional: list[str] = []
    values = positional
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            name, equals, value = argument[2:].partition("=")
            values = flags.setdefault(name, [])
            if equals:
                values.append(value)
        else:
            values.append(argument)
    return flags, positional


def get_double_dash_flags() -> JsonObject:
    """This process's flags, untyped: text, None for `None`, True for a bare flag, a list for several values."""
    flags, _ = split_flags(sys.argv[1:])
    return {name: _untyped(texts) for name, texts in flags.items()}


def parse_value(texts: Sequence[str], annotation: Annotation, *, flag: str) -> Json:
    """The value of one flag, read as its field would: text where text is allowed, else YAML.

    Raises:
        ConfigError: no value for a flag that needs one, or a value of the wrong kind.
    """
    if not texts:
        if _allows(annotation, bool):
            return True
        raise ConfigError(f"--{flag} needs a value ({type_name(annotation)}), as in --{flag} VALUE")
    if len(texts) > 1 or (_allows(annotation, list) and not texts[0].startswith("[")):
        if not _allows(annotation, list) and not _allows(annotation, tuple):
            raise ConfigError(f"--{flag} was given {len(texts)} values {list(texts)}; it takes one")
        if texts[0] in ("None", "null") and len(texts) == 1:
            return None
        return [_read(text, annotation=None) for text in texts]
    value = _read(texts[0], annotation)
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        kind = "" if isinstance(value, list) else f", which is not {type_name(annotation)}"
        raise ConfigError(f"--{flag} is {texts[0]!r}{kind}: {problem}") from None
    return value


def merge_dicts(*dicts: Mapping[str, Json]) -> JsonObject:
    """One dict; later ones win, nested dicts are merged in the same way."""
    merged: JsonObject = {}
    for each in dicts:
        for key, value in each.items():
            if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
                merged[key] = merge_dicts(merged[key], value)
            else:
                merged[key] = value
    return merged


def extract_namespace(model: BaseModel | Mapping[str, Json], prefix: str) -> JsonObject:
    """The entries whose name starts with `prefix`, without it.

    >>> extract_namespace({"env.group_size": 8, "slurm": False}, "env.")
    {'group_size': 8}
    """
    items = model.model_dump() if isinstance(model, BaseModel) else model
    return {key.removeprefix(prefix): value for key, value in items.items() if key.startswith(prefix)}


def get_prefixed_pydantic_model(base_model: type[BaseModel], prefix: str) -> type[BaseModel]:
    """A model with the fields of `base_model`, each named `<prefix><field>`."""
    fields: dict[str, Any] = {
        f"{prefix}{name}": (field.annotation, field) for name, field in base_model.model_fields.items()
    }
    return create_model(f"{base_model.__name__}Prefixed", **fields)


def adjust_model_defaults(model_class: type[BaseModel], defaults: BaseModel | Mapping[str, object]) -> type[BaseModel]:
    """A subclass `<Name>WithDefaults` of `model_class` with other default values."""
    values = (
        {name: getattr(defaults, name) for name in type(defaults).model_fields}
        if isinstance(defaults, BaseModel)
        else dict(defaults)
    )
    fields: dict[str, Any] = {
        name: (field.annotation, FieldInfo.merge_field_infos(field, default=values[name]))
        for name, field in model_class.model_fields.items()
        if name in values
    }
    return create_model(f"{model_class.__name__}WithDefaults", __base__=model_class, **fields)


def refuse_unknown(given: Iterable[str], known: Iterable[str], *, what: str) -> None:
    """Raise a ConfigError for the first name that is not known, with the nearest one that is."""
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(names))}"
            shown = f"{what}{name}" if what.endswith("--") else f"{what} {name!r}"
            raise ConfigError(f"unknown {shown}{hint}")


def mistakes(
    error: ValidationError, model: type[BaseModel], *, prefix: str = "", missing: str = "{place!r} is missing"
) -> str:
    """Return a sentence for each mistake: where it is, what was found, what was expected.

    Args:
        model: that was to be made, whose keys are the known ones.
        prefix: in front of each place, e.g. `env.`.
        missing: said of a key that is not there, with `{place}` and `{flag}`.
    """
    said = []
    for each in error.errors():
        where = (prefix + ".".join(map(str, each["loc"]))).removesuffix(".")
        if each["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(each["loc"][-1]), _keys_at(model, each["loc"][:-1]), n=1)
            said.append(f"unknown key {where!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        elif each["type"] == "missing":
            said.append(missing.format(place=where, flag=where.replace("_", "-")))
        elif each["loc"]:
            why = str(each.get("ctx", {})["error"]) if each["type"] == "value_error" else each["msg"]
            said.append(f"{where} is {each['input']!r}: {why}")
        else:  # of the model as a whole, whose input would be all settings, keys included
            why = str(each.get("ctx", {}).get("error", each["msg"]))
            said.append(f"{where}: {why}" if where else why)
    return "; ".join(said)


def _keys_at(model: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """Return the field names of the model that a place inside of `model` holds, also as an entry of a list.

    They are not told of places that name more than fields, such as one of several models.
    """
    for part in place:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation if part in model.model_fields else None
            inner = get_args(annotation)[0] if get_args(annotation) else annotation
            if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
                return []
            model = inner
    return list(model.model_fields)


def describe_fields(model: type[BaseModel], prefix: str, defaults: Mapping[str, object]) -> str:
    """Help text: every field as a flag with its type, meaning and default."""
    lines: list[str] = []
    for name, field in model.model_fields.items():
        default = defaults.get(name, field.default)
        shown = default.value if isinstance(default, Enum) else default
        lines.append(f"  --{prefix}{name} {_value_name(field.annotation)}")
        text = f"{field.description or 'no description'} (default: {'null' if shown is None else shown})"
        lines.append(textwrap.fill(text, width=110, initial_indent=" " * 8, subsequent_indent=" " * 8))
    return "\n".join(lines)


def _value_name(annotation: Annotation) -> str:
    """Return the name of a flag's value in the help: N, X, TEXT, true|false, one|other.

    >>> _value_name(int | None)
    'N'
    """
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) in (Union, types.UnionType):
        return "|".join(dict.fromkeys(map(_value_name, parts)))
    if get_origin(annotation) is Literal:
        return "|".join(map(str, parts))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(member.value) for member in annotation)
    return {int: "N", float: "X", str: "TEXT", bool: "true|false"}.get(get_origin(annotation) or annotation, "YAML")


def type_name(annotation: Annotation) -> str:
    """Return the name that a user has for the type of a field.

    >>> type_name(int | None)
    'int or null'
    """
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(part) for part in get_args(annotation))
    if origin is Literal:
        return " or ".join(str(value) for value in get_args(annotation))
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(str(member.value) for member in annotation)
    return getattr(annotation, "__name__", str(annotation))


def _untyped(texts: list[str]) -> bool | str | list[str | None] | None:
    if not texts:
        return True
    values = [None if text == "None" else text for text in texts]
    return values[0] if len(values) == 1 else values


def _read(text: str, annotation: Annotation) -> Json:
    """`text` as YAML when the field takes that as it is, else the text itself."""
    if text in ("None", "null"):
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if annotation is None:
        return value
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return value if isinstance(value, list | dict) and not _allows(annotation, str) else text
    return value


def _allows(annotation: Annotation, wanted: type) -> bool:
    """Return True when `wanted` is one of the types of the annotation."""
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_allows(part, wanted) for part in get_args(annotation))
    return annotation is wanted or get_origin(annotation) is wanted
