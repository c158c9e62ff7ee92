"""The part that SGLang and vLLM clients share: a tokenizer that is the engine's, prompt ids, the route for ids.

Ids of another tokenizer are valid numbers, so an engine answers them with nonsense instead of an error: an engine is
asked who it is. Whatever it does not tell is unknown, and no reason to refuse anything.
"""

import asyncio
import logging
from array import array
from collections.abc import Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import orjson

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.server_handling.conversation import render
from atroposlib.envs.server_handling.faults import EndpointUnavailable, ReplyFault
from atroposlib.envs.server_handling.openai_server import HttpServer, endpoint_urls
from atroposlib.envs.server_handling.sampling import GenerationRequest, checked_ids, drop_doubled_bos
from atroposlib.envs.server_handling.server_config import APIServerConfig, ReasoningConfig
from atroposlib.errors import AtroposError, ConfigError, ModelError, PathError, RequestFault
from atroposlib.type_definitions import Tokenizer

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.transport import Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """None where the engine does not say."""

    model: str | None = None  # folder or hub name of the weights
    tokenizer: str | None = None  # folder or hub name
    vocabulary: int | None = None  # number of ids it takes, those that only fill up the matrix included
    weights: str | None = None  # name of those that it serves now


class TokenServer(HttpServer):
    """An engine that is asked with token ids and answers with token ids and log-probabilities."""

    _tokenizer: Tokenizer = None
    _tokenizer_missing: bool = False
    _tokenizer_ids: int | None = None  # ids of the tokenizer; the engine may take more
    _largest_generated: int = -1  # id
    identity: EngineIdentity | None = None  # by its own account; None before it was asked, or where it says nothing
    _is_identified: bool = False

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        if not config.base_url:
            raise ConfigError(
                f"server_type {config.server_type} needs base_url, such as http://localhost:9001/v1; it is empty"
            )
        super().__init__(config, reasoning_config)
        self.openai_url = f"{self.root_url}/v1"
        self._context: int | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded at first use (0.7 s for the import alone); assign one to skip that."""
        if self._tokenizer is None:
            from atroposlib.data.tokenizers import load_tokenizer

            name = self.config.tokenizer_name
            self.tokenizer = load_tokenizer(self.config.model_name if name in ("none", "") else name)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer_ids = len(tokenizer) if isinstance(tokenizer, Sized) else None

    def adopt_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Use the caller's tokenizer of the same model, unless one is loaded already."""
        if self._tokenizer is None:
            self.tokenizer = tokenizer

    async def check_tokenizer(self, tokenizer: Tokenizer, name: str) -> None:
        """Refuse a tokenizer that is not the engine's, as far as the engine tells; one or two requests.

        Raises:
            ConfigError: it is another one.
            EndpointUnavailable, DeadlineFault: the engine does not answer now.
        """
        identity = await self.identify()
        if identity is None or name == identity.tokenizer:
            return
        server_type, model = self.config.server_type, self.config.model_name
        try:
            text = probe_text(tokenizer)
            ids = await ask_ids(self.transport, server_type, self.root_url, model, text)
            refuse_foreign(tokenizer, name, self.root_url, identity, ids, text)
        except (AttributeError, TypeError) as error:  # an author's own tokenizer with fewer methods
            logger.info("tokenizer %s cannot be compared with that of %s: %s", name, self.root_url, error)

    async def identify(self) -> EngineIdentity | None:
        """Ask the engine who it is, once.

        Raises:
            EndpointUnavailable: nothing answers.
        """
        if not self._is_identified:
            self.identity = await ask_identity(self.transport, self.config.server_type, self.root_url)
            self._is_identified = True
            self._answered_with(None if self.identity is None else self.identity.weights)
        return self.identity

    def _known_ids(self) -> int | None:
        """Number of ids that may be sent by what is known so far; None when neither engine nor tokenizer can say.

        The engine's own number counts, with the ids that only fill up its matrix. Where it does not tell, what its
        like have generated is surely among them.
        """
        if self.identity is not None and self.identity.vocabulary is not None:
            return self.identity.vocabulary
        if self._tokenizer is None and not self._tokenizer_missing:
            try:
                _ = self.tokenizer
            except AtroposError as error:
                self._tokenizer_missing = True
                logger.warning("prompt ids cannot be checked, the tokenizer does not load: %s", error)
        if self._tokenizer_ids is None:
            return None
        like = [server for server in (self, *self.peers) if isinstance(server, TokenServer)]
        return max(self._tokenizer_ids, *(server._largest_generated + 1 for server in like))

    def _note_generated(self, outputs: Sequence[Sequence[int]]) -> None:
        if self.identity is None or self.identity.vocabulary is None:
            self._largest_generated = max(self._largest_generated, *(max(ids) for ids in outputs if ids), -1)

    async def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        """`input_ids` as given, else the encoded `prompt`; checked against the vocabulary.

        Raises:
            RequestFault: neither is there, or an id is out of range.
        """
        ids, prompt = request.input_ids, request.prompt
        if ids is None and prompt is None:
            raise RequestFault("a token request needs input_ids or prompt; got neither")
        if ids is None:
            ids = drop_doubled_bos(self.tokenizer.encode(prompt), self.tokenizer.bos_token_id)
        if not isinstance(ids, array):
            ids = list(ids)  # what is returned is an author's to change, and so is what was given
        try:
            return checked_ids(ids, self._known_ids())
        except RequestFault:
            if self._is_identified or len(ids) == 0:
                raise
        await self.identify()  # it may have more ids than its tokenizer
        return checked_ids(ids, self._known_ids())

    async def _room_for(self, prompt_tokens: int) -> int | None:
        """New tokens that fit behind the prompt; None when the server does not tell its context length."""
        length = await self.context_length()
        return None if length is None else max(1, length - prompt_tokens - 1)

    async def context_length(self) -> int | None:
        """Tokens of the engine's context; None when the server does not tell."""
        if self._context is None:
            try:
                status, body = await self.transport.get(f"{self.openai_url}/models", timeout_s=30)
            except EndpointUnavailable:
                return None
            if status != 200:
                return None
            try:
                length = orjson.loads(body)["data"][0]["max_model_len"]
                self._context = length if isinstance(length, int) else None
            except (ValueError, LookupError, TypeError):  # a page of a gateway, or a list of another kind
                return None
        return self._context

    def _health_url(self) -> str:
        return f"{self.root_url}/health"


PROBE = "The sum of 1,234 and 56 is 1290;\n\tdef f(x): return x**2  # naïve ☃ 你好"
"""A text that different tokenizers cut differently."""

ASK_TIMEOUT_S, ECHO_TIMEOUT_S = 5.0, 60.0
_OK = 200
_ABOUT = {"sglang": ("/model_info", "/get_model_info"), "vllm": ("/v1/models",)}
_MORE_ABOUT = "/get_server_info"


async def ask_identity(transport: "Transport", server_type: str, root_url: str) -> EngineIdentity | None:
    """Ask a server that is up who it is; None when it has no route for that.

    Raises:
        EndpointUnavailable: nothing answers.
    """
    for path in _ABOUT[server_type]:
        status, body = await transport.get(root_url + path, timeout_s=ASK_TIMEOUT_S)
        identity = _identity(body) if status == _OK else None
        if identity is not None and identity.vocabulary is None and server_type == "sglang":
            status, more = await transport.get(root_url + _MORE_ABOUT, timeout_s=ASK_TIMEOUT_S)
            further = _identity(more) if status == _OK else None
            return (
                replace(further, weights=identity.weights) if further is not None and further.vocabulary else identity
            )
        if identity is not None:
            return identity
    return None


async def ask_ids(transport: "Transport", server_type: str, root_url: str, model: str, text: str) -> list[int] | None:
    """Ask which ids the engine itself makes of `text`; None when it does not tell.

    Raises:
        EndpointUnavailable, DeadlineFault: nothing answers now.
    """
    if server_type == "vllm":
        url, body = f"{root_url}/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}
    else:
        sampling = {"max_new_tokens": 1, "temperature": 0}
        url = f"{root_url}/generate"
        body = {"text": text, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    try:
        reply = orjson.loads(await transport.post(url, body, deadline_s=ECHO_TIMEOUT_S))
        echo = reply["tokens"] if server_type == "vllm" else reply["meta_info"]["input_token_logprobs"]
        ids = [entry if server_type == "vllm" else entry[1] for entry in echo]
    except (RequestFault, ReplyFault, ValueError, LookupError, TypeError):  # it speaks otherwise
        return None
    return ids if ids and all(type(token) is int for token in ids) else None


def load_for(name: str, configs: Sequence[APIServerConfig]) -> tuple[Tokenizer, str]:
    """The tokenizer of an environment, and its name.

    Args:
        name: the environment's setting. Left at its default, the servers' setting is taken, else what the engine says,
            else the tokenizer of the model that the servers name.

    Raises:
        ModelError: there is no such tokenizer.
    """
    from atroposlib.data.tokenizers import load_tokenizer

    for other in _others(configs) if name == BaseEnvConfig.model_fields["tokenizer_name"].default else ():
        try:
            tokenizer = load_tokenizer(other)
        except (ModelError, PathError) as error:
            logger.info("not the tokenizer of the environment: %s", error)
        else:
            logger.info("tokenizer of the served model: %s", other)
            return tokenizer, other
    return load_tokenizer(name), name


def _others(configs: Sequence[APIServerConfig]) -> list[str]:
    asked = [config for config in configs if config.server_type in _ABOUT and config.base_url]
    named = [config.tokenizer_name for config in asked if config.tokenizer_name not in ("none", "")]
    if named or not asked:
        return named[:1]
    identity = _ask_now(asked[0])
    told = [identity.tokenizer, identity.model] if identity else []
    return list(dict.fromkeys(name for name in (*told, asked[0].model_name) if name and name != "default"))


def refuse_foreign(
    tokenizer: Tokenizer, name: str, base_url: str, identity: EngineIdentity, ids: Sequence[int] | None, text: str
) -> None:
    """Raise ConfigError when a tokenizer is not the engine's; `ids` are the engine's for `text`, None: unknown."""
    base_size = getattr(tokenizer, "vocab_size", None)  # without added tokens, which a model may lack
    is_larger = isinstance(base_size, int) and identity.vocabulary is not None and base_size > identity.vocabulary
    if not is_larger and (ids is None or not is_foreign(tokenizer, ids, text)):
        return
    theirs = identity.tokenizer or identity.model
    sizes = f" ({identity.vocabulary} ids)" if identity.vocabulary else ""
    own = list(tokenizer.encode(text, add_special_tokens=False))
    shown = "" if ids is None else f": a short chat is {_start(ids)} there and {_start(own)} here"
    raise ConfigError(
        f"{base_url} serves {identity.model} with the tokenizer {theirs}{sizes}, but the environment uses the "
        f"tokenizer {name} ({len(tokenizer)} ids){shown}. Set env.tokenizer_name to {theirs}, or base_url "
        "to a server of the model that is meant"
    )


def probe_text(tokenizer: object) -> str:
    """The probe as a prompt of the tokenizer's chat template, so that its special tokens are in it."""
    from jinja2 import TemplateError

    try:
        return render(tokenizer, [{"role": "user", "content": PROBE}])
    except (TemplateError, TypeError, ValueError):  # a template for other messages
        return PROBE


def is_foreign(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> bool:
    """Tell if `ids`, the engine's for `text`, mean something else to `tokenizer`.

    Other cuts of the same text do not count, as releases of one tokenizer may differ in them. But a special token of
    the text must be the same id there and here.
    """
    own = list(tokenizer.encode(text, add_special_tokens=False))
    common = min(len(own), len(ids))  # an engine may add a first token, or say nothing of the first
    if common > len(own) / 2 and list(ids[-common:]) == own[-common:]:
        return False
    marks = set(tokenizer.get_added_vocab().values()) if hasattr(tokenizer, "get_added_vocab") else set()
    if not (set(own) & marks) <= set(ids):
        return True
    try:
        return _squeezed(tokenizer.decode(own)) not in _squeezed(tokenizer.decode(list(ids)))
    except (IndexError, KeyError, TypeError, OverflowError):  # an id that the tokenizer does not have
        return True


def _identity(body: bytes) -> EngineIdentity | None:
    """Of SGLang's model or server info, or vLLM's list of models."""
    try:
        about = orjson.loads(body)
        if isinstance(about, dict) and about.get("object") == "list":
            about = {"model_path": about["data"][0].get("root") or about["data"][0]["id"]}
        if not isinstance(about, dict) or "model_path" not in about:
            return None
    except (ValueError, LookupError, AttributeError, TypeError):
        return None
    model, tokenizer = _text(about.get("model_path")), _text(about.get("tokenizer_path"))
    size = about.get("vocab_size")
    vocabulary = size if type(size) is int and size > 0 else _vocabulary_of(model)
    return EngineIdentity(model, tokenizer or model, vocabulary, _text(about.get("weight_version")))


def _vocabulary_of(model: str | None) -> int | None:
    """By the model's own config, where it is on this machine."""
    from atroposlib.data.tokenizers import padded_vocabulary

    if model is None or "/" not in model or model.endswith(".gguf"):
        return None
    try:
        return padded_vocabulary(model)
    except PathError:
        return None


def _ask_now(config: APIServerConfig) -> EngineIdentity | None:
    """As `ask_identity`, for callers that cannot await; None also when nothing answers."""
    from atroposlib.envs.server_handling.transport import Transport  # loads aiohttp, 0.2 CPU-s

    async def ask() -> EngineIdentity | None:
        transport = Transport(config.api_key, config.base_url)
        try:
            return await ask_identity(transport, config.server_type, endpoint_urls(config)[0])
        except EndpointUnavailable:
            return None
        finally:
            await transport.close()

    with ThreadPoolExecutor(1) as thread:  # there may be an event loop in this one
        return thread.submit(asyncio.run, ask()).result()


def _start(ids: Sequence[int]) -> str:
    return f"[{', '.join(map(str, ids[:6]))}, ...]"


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
