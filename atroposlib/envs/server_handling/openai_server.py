"""Client of any OpenAI-style endpoint: chat and completions, no token ids."""

from atroposlib.envs.server_handling.http_server import HttpServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ReasoningConfig, TokensAndLogprobs
from atroposlib.envs.server_handling.server_config import resolve_openai_configs

__all__ = ["APIServerConfig", "OpenAIServer", "ReasoningConfig", "resolve_openai_configs"]


class OpenAIServer(HttpServer):
    """One OpenAI-style endpoint."""

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: object) -> TokensAndLogprobs:
        raise NotImplementedError(
            "OpenAI-style endpoints give no token ids, so nothing can be trained on their replies. Use an engine with "
            "server_type sglang or vllm, or set ATROPOS_ALLOW_DUMMY_MANAGED_SERVER=1 for text without real tokens."
        )
