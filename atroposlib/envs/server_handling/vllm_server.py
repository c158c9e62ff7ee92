"""Client of a vLLM server: stock `vllm serve`, or upstream's own server with a `/generate` route."""

from collections.abc import Mapping
from typing import Any

from atroposlib.envs.server_handling.config_merge import resolve_openai_configs
from atroposlib.envs.server_handling.faults import (
    UNAVAILABLE,
    BadReply,
    EndpointUnavailable,
    ReplyFault,
    fault_in_reply,
    read_json,
)
from atroposlib.envs.server_handling.sampling import VLLM_NAMES, VLLM_SAMPLING, sampling_of
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ReasoningConfig, TokensAndLogprobs
from atroposlib.envs.server_handling.token_server import TokenServer
from atroposlib.envs.server_handling.vllm_replies import (
    Choices,
    candidates,
    completion_choices,
    generate_choices,
    prompt_positions,
)
from atroposlib.rollouts.trace import EngineReply

__all__ = ["APIServerConfig", "ReasoningConfig", "VLLMServer", "resolve_openai_configs"]

_NOT_FOUND = 404


class VLLMServer(TokenServer):
    """One vLLM server."""

    _is_stock: bool | None = None  # None: no reply yet

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        prompt_ids = await self._prompt_ids(kwargs)
        sampling = {**self._sampling(kwargs), "logprobs": 0}
        if "max_tokens" not in sampling:  # vLLM would stop after 16
            room = await self._room_for(len(prompt_ids))
            sampling |= {} if room is None else {"max_tokens": room}
        reply = await self._ask(prompt_ids, sampling, kwargs)
        choices = self._choices(reply, sampling.get("n", 1))
        self._note_generated(choices.ids)
        self._record(
            EngineReply(
                finish_reasons=choices.finish_reasons,
                prompt_tokens=len(prompt_ids),
                completion_tokens=sum(map(len, choices.ids)),
                model=kwargs.get("model"),
                base_url=self.root_url,
                weight_version=choices.weight_version,
                sampling=sampling,
            )
        )
        return prompt_ids, choices.ids, choices.logprobs, list(choices.finish_reasons)

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        prompt_ids = await self._prompt_ids(kwargs)
        top_k = max(1, kwargs.pop("top_k", None) or kwargs.pop("top_logprobs", None) or 1)
        sampling = {**self._sampling({"max_tokens": 1, **kwargs}), "prompt_logprobs": top_k}
        sampling |= {"n": 1, "temperature": 0.0, "top_p": 1.0}
        positions = prompt_positions(await self._ask(prompt_ids, sampling, kwargs))
        ranked = [sorted(candidates(position), key=lambda pair: -pair[1])[:top_k] for position in positions]
        own = [dict(candidates(each)).get(token) for token, each in zip(prompt_ids, positions, strict=True)]
        return {
            "prompt_tokens": prompt_ids,
            "prompt_logprobs": own,
            "prompt_topk_token_ids": [[token for token, _ in pairs] for pairs in ranked],
            "prompt_topk_logprobs": [[logprob for _, logprob in pairs] for pairs in ranked],
        }

    def _choices(self, reply: dict[str, Any], n: int) -> Choices:
        """Read a reply; BadReply when that is not n whole choices."""
        try:
            choices = completion_choices(reply) if self._is_stock else generate_choices(reply)
        except (AttributeError, IndexError, KeyError, TypeError) as error:  # null where a choice or a position belongs
            raise BadReply(f"{self.root_url} gave no readable choices ({error!r}): {str(reply)[:500]}") from error
        if flaw := choices.flaw(n):
            raise BadReply(f"{self.root_url} gave {flaw}: {str(reply)[:500]}")
        return choices

    def _sampling(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return sampling_of(kwargs, names=VLLM_NAMES, allowed=VLLM_SAMPLING, engine="vLLM")

    async def _ask(self, prompt_ids: list[int], sampling: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The reply of the route that this server has. A server without `/generate` is stock vLLM."""
        is_stock = self._is_stock
        if is_stock is None:
            status, _ = await self.transport.get(f"{self.root_url}/generate", timeout_s=30)
            if status in UNAVAILABLE:  # a gateway whose server is not up yet
                raise EndpointUnavailable(f"GET {self.root_url}/generate answered {status}")
            is_stock = status == _NOT_FOUND
        if is_stock:
            url = f"{self.openai_url}/completions"
            model = kwargs.get("model") or self.config.model_name  # a LoRA adapter is chosen by its name
            asked = {"return_token_ids": True, "return_weight_versions": True}  # older versions ignore the second
            body = {"model": model, "prompt": prompt_ids, **asked, **sampling}
        else:
            url, body = f"{self.root_url}/generate", {"prompt": {"prompt_token_ids": prompt_ids}, **sampling}
        data = await self._post(url, body, kwargs, sampling.get("max_tokens"))
        reply = read_json(data)
        if fault := fault_in_reply(url, reply):
            raise fault
        if not isinstance(reply, dict) or reply.get("object") == "error":
            raise ReplyFault(f"{url} answered an error as if all were well: {data[:500]!r}")
        self._is_stock = is_stock  # only now is it sure: a gateway whose server is not up yet may say 404, too
        return reply
