"""JSON and YAML that a model wrote. A key that an object has twice says two things, so that it is refused."""

import json
import re
from collections.abc import Hashable
from typing import Any

import yaml

from atroposlib.environments.intern_bootcamp.bootcamp import extract_answer

_FENCES = re.compile(r"\A```(?:json)?|```\Z")


def answered_object(said: str) -> dict[str, Any] | None:
    """Return the JSON object in a reply's last answer tags, inside a code fence or not; None for none."""
    try:
        given = read_json(_FENCES.sub("", extract_answer(said) or ""))
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


def read_json(text: str) -> Any:
    """Return what JSON holds; ValueError for none, or an object with a key twice; RecursionError where it is too deep.

    >>> read_json('{"a": 1, "b": {"a": 2}}')
    {'a': 1, 'b': {'a': 2}}
    """
    return json.loads(text, object_pairs_hook=_once)


def read_yaml(text: str, *, as_texts: bool = False) -> Any:
    """Return what YAML holds, its values as texts where wanted (`no` is none of `false`).

    Raises:
        yaml.YAMLError, ValueError, RecursionError: it is none, has a key twice or is too deep.
    """
    return yaml.load(text, Loader=_TextLoader if as_texts else _Loader)  # both are safe


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key comes twice")
    return made


class _Once(yaml.constructor.BaseConstructor):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len({*keys}) < len(keys):
            raise yaml.constructor.ConstructorError(None, None, "a key comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


class _Loader(_Once, yaml.SafeLoader):
    pass


class _TextLoader(_Once, yaml.BaseLoader):
    pass
