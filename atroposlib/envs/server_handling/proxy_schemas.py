"""Requests and replies of the managed-server proxy, and its config file."""

import logging
from functools import lru_cache

import orjson
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from atroposlib.envs.server_handling.sampling import OPTIONS
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.errors import ConfigError
from atroposlib.paths import expand_path
from atroposlib.type_definitions import JsonObject, Tokenizer

logger = logging.getLogger(__name__)

UNKNOWN_SESSION = "unknown_session_error"
"""The type of the error that says a session is gone: the proxy was restarted, or the session deleted or unused."""


class UnknownSessionError(LookupError):
    """No session has this id: never created, deleted, or expired."""


class ChatCompletionProxyRequest(BaseModel):
    """OpenAI's chat request. Further fields that an engine knows, such as `top_p`, go there as they are."""

    model_config = ConfigDict(extra="allow")

    messages: list[JsonObject]
    max_tokens: PositiveInt = 1024
    max_completion_tokens: PositiveInt | None = None
    temperature: float = 1.0
    n: PositiveInt = 1
    stop: list[str] | str | None = None
    stream: bool = False
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None


def known_options(given: JsonObject, allowed: frozenset[str] = OPTIONS | {"split"}) -> JsonObject:
    """`given` without what is not allowed: OpenAI's clients send much that is meant for OpenAI only."""
    unknown = given.keys() - allowed
    for key in unknown:
        _note_ignored(key)
    return {key: value for key, value in given.items() if key not in unknown}


@lru_cache(maxsize=1000)
def _note_ignored(key: str) -> None:
    """Once for each key."""
    logger.warning("request field ignored, no engine knows it: %s", key)


class SessionCreateRequest(BaseModel):
    """Settings of a session: its server, and its ways to track."""

    tool_parser: str = "hermes"
    reasoning_parser: str | None = None
    track_tree: bool = False
    base_url: str | None = None


class SessionCreateResponse(BaseModel):
    """A new session."""

    uuid: str
    model_name: str
    tool_parser: str
    base_url: str | None = None
    created_at: float


class RenderResponse(BaseModel):
    """The prompt that a chat request would send."""

    prompt_text: str
    token_ids: list[int]
    num_tokens: int


class ServersConfig(BaseModel):
    """The config file, and the body of /setup."""

    model_name: str
    tokenizer_name: str = "none"
    servers: list[JsonObject] = Field(min_length=1)

    def server_configs(self) -> list[APIServerConfig]:
        """One per server; `server_type` is vllm unless given."""
        shared = {"server_type": "vllm", "model_name": self.model_name, "tokenizer_name": self.tokenizer_name}
        return [APIServerConfig(**{**shared, **server}) for server in self.servers]

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        from atroposlib.data.tokenizers import load_tokenizer

        return load_tokenizer(self.model_name if self.tokenizer_name == "none" else self.tokenizer_name)


def load_config(path: str) -> ServersConfig:
    """The config file; ConfigError says what is wrong with it."""
    file = expand_path(path, what="--config")
    try:
        return ServersConfig.model_validate(orjson.loads(file.read_bytes()))
    except (OSError, orjson.JSONDecodeError, ValidationError) as error:
        raise ConfigError(f"--config {file} cannot be used: {error}") from error
