"""The part that SGLang and vLLM clients share: a tokenizer, prompt ids, and the route that takes and gives ids."""

import logging
from collections.abc import Sequence, Sized

import orjson

from atroposlib.envs.server_handling.engine_info import (
    EngineIdentity,
    ask_identity,
    ask_ids,
    probe_text,
    refuse_foreign,
)
from atroposlib.envs.server_handling.faults import EndpointUnavailable
from atroposlib.envs.server_handling.openai_server import HttpServer
from atroposlib.envs.server_handling.sampling import GenerationRequest, checked_ids, drop_doubled_bos
from atroposlib.envs.server_handling.server_config import APIServerConfig, ReasoningConfig
from atroposlib.errors import AtroposError, ConfigError, RequestFault
from atroposlib.type_definitions import Tokenizer

logger = logging.getLogger(__name__)


class TokenServer(HttpServer):
    """An engine that is asked with token ids and answers with token ids and log-probabilities."""

    _tokenizer: Tokenizer = None
    _tokenizer_missing: bool = False
    _tokenizer_ids: int | None = None  # ids of the tokenizer; the engine may take more
    _largest_generated: int = -1  # id
    _identity: EngineIdentity | None = None
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

    @property
    def identity(self) -> EngineIdentity | None:
        """The engine by its own account; None before it was asked, or where it says nothing."""
        return self._identity

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
            self._identity = await ask_identity(self.transport, self.config.server_type, self.root_url)
            self._is_identified = True
            self._answered_with(None if self._identity is None else self._identity.weights)
        return self._identity

    def _known_ids(self) -> int | None:
        """Number of ids that may be sent by what is known so far; None when neither engine nor tokenizer can say.

        The engine's own number counts, with the ids that only fill up its matrix. Where it does not tell, what its
        like have generated is surely among them.
        """
        if self._identity is not None and self._identity.vocabulary is not None:
            return self._identity.vocabulary
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
        if self._identity is None or self._identity.vocabulary is None:
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
        known = self._known_ids()
        if known is not None and not self._is_identified and max(ids, default=-1) >= known:
            await self.identify()
            known = self._known_ids()
        return checked_ids(ids, known)

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
                self._context = orjson.loads(body)["data"][0]["max_model_len"]
            except (ValueError, LookupError, TypeError):  # a page of a gateway, or a list of another kind
                return None
        return self._context

    def _health_url(self) -> str:
        return f"{self.root_url}/health"
