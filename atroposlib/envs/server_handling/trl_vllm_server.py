"""Client of the vLLM server that TRL starts (`trl vllm-serve`): text in, token ids out, no log-probabilities."""

from typing import TYPE_CHECKING

import aiohttp
from transformers import AutoTokenizer

from atroposlib.data.tokenizers import plain_chat_ids
from atroposlib.envs.server_handling.faults import BadReply, ReplyFault, fault_of_status
from atroposlib.envs.server_handling.openai_server import generation_deadline_s
from atroposlib.envs.server_handling.openai_wire import Made, chat_of, completion_of
from atroposlib.envs.server_handling.sampling import GenerationRequest, max_tokens_of
from atroposlib.envs.server_handling.server_baseline import APIServer, TokensAndLogprobs
from atroposlib.envs.server_handling.server_config import APIServerConfig, ReasoningConfig, without_login
from atroposlib.envs.server_handling.transport import (
    authorization,
    connection_faults,
    request_json,
)
from atroposlib.rollouts.trace import EngineReply, finish_reason_of
from atroposlib.type_definitions import Json

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

SAMPLING = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens")


class TrlVllmServer(APIServer):
    """One TRL server."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config)
        self.config = config
        self.tokenizer = plain_chat_ids(AutoTokenizer.from_pretrained(config.model_name))

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """TRL has no cheap health route that all its versions share; a failed request shows an outage."""
        self.server_healthy = True

    async def _chat_completion_wrapper(self, **kwargs: object) -> "ChatCompletion":
        request = GenerationRequest(kwargs)
        messages = request.options["messages"]
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return chat_of(await self._generate(prompt, request), self.config.model_name)

    async def _completion_wrapper(self, **kwargs: object) -> "Completion":
        request = GenerationRequest(kwargs)
        return completion_of(await self._generate(request.options["prompt"], request), self.config.model_name)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: object) -> TokensAndLogprobs:
        raise NotImplementedError(
            "Token-level logprobs are not supported by the TRL server; use VLLMServer or SGLangServer "
            "(server_type vllm or sglang)"
        )

    async def _generate(self, prompt: str, request: GenerationRequest) -> list[Made]:
        base_url = without_login((self.config.base_url or "").rstrip("/"))
        url = f"{base_url}/generate/"
        deadline_s = generation_deadline_s(max_tokens_of(request.options), self.config.timeout)
        asked = {key: value for key in SAMPLING if (value := request.options.get(key)) is not None}
        session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=deadline_s),
            headers=authorization(self.config.api_key, self.config.base_url),
            raise_for_status=_raise_for_status,
            json_serialize=lambda body: request_json(body).decode(),
        )
        with connection_faults(url, deadline_s):
            async with session as opened, opened.post(url, json={"prompts": [prompt], **asked}) as reply:
                try:
                    answer: Json = await reply.json()  # the one method of the replies in tests written for 0.4.0
                except (ValueError, aiohttp.ContentTypeError) as error:
                    raise ReplyFault(f"reply of {url} is not JSON: {error}") from error
        outputs: Json = answer.get("completion_ids") if isinstance(answer, dict) else None
        is_whole = isinstance(outputs, list) and all(isinstance(ids, list) for ids in outputs)
        if not is_whole or len(outputs) != asked.get("n", len(outputs)):
            raise BadReply(f"{url} gave no completion_ids for n={asked.get('n', 1)}: {str(answer)[:300]}")
        prompt_tokens = len(answer.get("prompt_ids", [[]])[0])  # older versions do not say
        eos = self.tokenizer.eos_token_id
        made = [
            Made(
                self.tokenizer.decode(ids, skip_special_tokens=True),
                "stop" if eos in ids else "length",
                prompt_tokens,
                len(ids),
            )
            for ids in outputs
        ]
        self._record(
            EngineReply(
                finish_reasons=[finish_reason_of(each.finish_reason) for each in made],
                prompt_tokens=prompt_tokens,
                completion_tokens=sum(map(len, outputs)),
                model=self.config.model_name,
                base_url=base_url,
                sampling=asked,
            )
        )
        return made


async def _raise_for_status(reply: aiohttp.ClientResponse) -> None:
    if reply.status >= 300:
        raise fault_of_status(str(reply.url), reply.status, await reply.read(), reply.headers.get("Retry-After"))
