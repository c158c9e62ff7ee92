"""Check from files alone that a model, its tokenizer and the lengths of a run fit together."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atroposlib.data.tokenizers import cached_file
from atroposlib.errors import ModelError
from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.engine_plan import DEFAULT_CONTEXT
from atroposlib.type_definitions import Json, JsonObject

DEFAULT_TOKEN_LENGTH = 2048  # of BaseEnvConfig


@dataclass(frozen=True)
class Model:
    """The model as the run uses it. Paths may be hub names."""

    name: str
    path: str
    tokenizer: str
    own_tokenizer: str  # the one that came with the model


def model_problems(config: DatagenConfig, model: Model) -> list[str]:
    """Sentences about lengths, and about a tokenizer that is not the model's."""
    facts = model_facts(model)
    context = config.engine.context or (DEFAULT_CONTEXT if config.engine.kind == "embedded" else model_context(facts))
    return [*_length_problems(config, context), *_tokenizer_problems(model, facts)]


def model_facts(model: Model) -> JsonObject:
    """Its config.json; {} when that is not on this machine."""
    return _json_file(model.path, "config.json")


def model_context(facts: Mapping[str, Json]) -> int | None:
    """Tokens that a model takes, by its config.json; None when it does not say.

    >>> model_context({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 40}})
    163840
    >>> model_context({"max_position_embeddings": 163840, "rope_scaling": {"type": "yarn", "factor": 40,
    ...     "original_max_position_embeddings": 4096}})
    163840
    """
    text: Mapping[str, Json] = facts.get("text_config") or facts
    length = text.get("max_position_embeddings") or text.get("max_sequence_length") or text.get("n_positions")
    if not isinstance(length, int):
        return None
    scaling = text.get("rope_scaling") or {}
    already_scaled = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    return length if already_scaled else int(length * (scaling.get("factor") or 1))


def _length_problems(config: DatagenConfig, context: int | None) -> list[str]:
    """An answer as long as allowed must fit the context together with the longest prompt."""
    answer, prompt = config.environment.env.get("max_token_length", DEFAULT_TOKEN_LENGTH), config.max_prompt_tokens
    if context is None or not isinstance(answer, int) or answer + prompt <= context:
        return []
    return [
        f"environment.env.max_token_length is {answer} and max_prompt_tokens is {prompt}, together more than the "
        f"context of {context} tokens; lower one of them or raise engine.context"
    ]


def _tokenizer_problems(model: Model, facts: Mapping[str, Json]) -> list[str]:
    """Ids beyond the model's vocabulary kill an engine; ids that mean another text spoil the data silently."""
    words = vocabulary(model.tokenizer)
    rows = (facts.get("text_config") or facts).get("vocab_size")
    if not words:
        return []
    highest = max(words.values())
    if isinstance(rows, int) and highest >= rows:
        return [
            f"the tokenizer {model.tokenizer} has ids up to {highest}, but the model {model.path} only has {rows}; "
            "use the model's own tokenizer"
        ]
    own = vocabulary(model.own_tokenizer) if model.own_tokenizer != model.tokenizer else {}
    other = [token for token, number in own.items() if words.get(token) != number]
    if not other:
        return []
    return [
        f"the tokenizer {model.tokenizer} is not that of the model {model.path}: {len(other)} of {len(own)} tokens, "
        f"e.g. {other[0]!r}, have another id; use the model's own tokenizer"
    ]


def vocabulary(tokenizer: str) -> dict[str, int]:
    """Token to id, added tokens included; {} when the files are not here."""
    content = _json_file(tokenizer, "tokenizer.json")
    vocab = (content.get("model") or {}).get("vocab") or {}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    return {**vocab, **added} if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)} | added


def _json_file(name: str, file: str) -> JsonObject:
    """A file of a model folder or of a hub model in the local cache; {} when it is not there."""
    path: Path | None = Path(name, file)
    if not path.is_file():
        path = cached_file(name, file)
    if path is None:
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is damaged ({error}); fetch {name} again") from None
