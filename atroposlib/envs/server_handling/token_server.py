"""What SGLang and vLLM clients share: a tokenizer, prompt ids, and the route that takes and gives ids."""

import logging
from collections.abc import Mapping, Sized
from typing import Any

import orjson

from atroposlib.envs.server_handling.faults import EndpointUnavailable
from atroposlib.envs.server_handling.http_server import HttpServer
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.sampling import checked_ids, drop_doubled_bos
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.errors import ConfigError, RequestFault

logger = logging.getLogger(__name__)


class TokenServer(HttpServer):
    """An engine that is asked with token ids and answers with token ids and log-probabilities."""

    _tokenizer: Any = None
    _tokenizer_missing: bool = False
    _vocabulary: int | None = None

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        if not config.base_url:
            raise ConfigError(
                f"server_type {config.server_type} needs base_url, such as http://localhost:9001/v1; it is empty"
            )
        super().__init__(config, reasoning_config)
        self.openai_url = f"{self.root_url}/v1"
        self._context: int | None = None

    @property
    def tokenizer(self) -> Any:
        """Loaded at first use (0.7 s for the import alone); assign one to skip that."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            name = self.config.tokenizer_name
            self.tokenizer = AutoTokenizer.from_pretrained(self.config.model_name if name in ("none", "") else name)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = len(tokenizer) if isinstance(tokenizer, Sized) else None

    def adopt_tokenizer(self, tokenizer: Any) -> None:
        """Use the caller's tokenizer of the same model, unless one is loaded already."""
        if self._tokenizer is None:
            self.tokenizer = tokenizer

    def _vocabulary_size(self) -> int | None:
        """Number of token ids that may be sent; None when no tokenizer can say."""
        if self._tokenizer is None and not self._tokenizer_missing:
            try:
                _ = self.tokenizer
            except (OSError, ValueError) as error:
                self._tokenizer_missing = True
                logger.warning("prompt ids cannot be checked, the tokenizer does not load: %s", error)
        return self._vocabulary

    def _prompt_ids(self, kwargs: Mapping[str, Any]) -> list[int]:
        """`input_ids` as given, else the encoded `prompt`; checked against the vocabulary.

        Raises:
            RequestFault: neither is there, or an id is out of range.
        """
        ids, prompt = kwargs.get("input_ids"), kwargs.get("prompt")
        if ids is None and prompt is None:
            raise RequestFault("a token request needs input_ids or prompt; got neither")
        if ids is None:
            ids = drop_doubled_bos(self.tokenizer.encode(prompt), self.tokenizer.bos_token_id)
        return checked_ids(ids, self._vocabulary_size())

    async def _room_for(self, prompt_tokens: int) -> int | None:
        """New tokens that fit behind the prompt; None when the server does not tell its context length."""
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
        return None if self._context is None else max(1, self._context - prompt_tokens - 1)

    def _health_url(self) -> str:
        return f"{self.root_url}/health"
