"""Client of a vLLM server with the `/generate` route of `example_trainer/vllm_api_server.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from atroposlib.envs.server_handling.config_merge import resolve_openai_configs
from atroposlib.envs.server_handling.faults import ReplyFault
from atroposlib.envs.server_handling.sampling import VLLM_NAMES, VLLM_SAMPLING, sampling_of
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ReasoningConfig, TokensAndLogprobs
from atroposlib.envs.server_handling.token_server import TokenServer
from atroposlib.rollouts.trace import EngineReply, finish_reason_of

__all__ = ["APIServerConfig", "ReasoningConfig", "VLLMServer", "resolve_openai_configs"]

Position = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""Candidates of one position: {token id: log-probability or {"logprob": x}}, or a list of such objects."""


class VLLMServer(TokenServer):
    """One vLLM server."""

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        prompt_ids = self._prompt_ids(kwargs)
        sampling = {**self._sampling(kwargs), "logprobs": 0}
        if "max_tokens" not in sampling:  # vLLM would stop after 16
            room = await self._room_for(len(prompt_ids))
            sampling |= {} if room is None else {"max_tokens": room}
        reply = await self._generate(prompt_ids, sampling, kwargs)
        choices = [[_chosen(position) for position in positions] for positions in _field(reply, "logprobs")]
        reasons: list[str] = [finish_reason_of(reason) for reason in _field(reply, "finish_reasons")]
        ids = [[token for token, _ in choice] for choice in choices]
        self._record(
            EngineReply(
                finish_reasons=[finish_reason_of(reason) for reason in reasons],
                prompt_tokens=len(prompt_ids),
                completion_tokens=sum(map(len, ids)),
                model=kwargs.get("model"),
                base_url=self.root_url,
                sampling=sampling,
            )
        )
        return prompt_ids, ids, [[logprob for _, logprob in choice] for choice in choices], reasons

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        prompt_ids = self._prompt_ids(kwargs)
        top_k = max(1, kwargs.pop("top_k", None) or kwargs.pop("top_logprobs", None) or 1)
        sampling = {**self._sampling({"max_tokens": 1, **kwargs}), "prompt_logprobs": top_k}
        sampling |= {"n": 1, "temperature": 0.0, "top_p": 1.0}
        reply = await self._generate(prompt_ids, sampling, kwargs)
        positions = _field(reply, "prompt_logprobs")
        if len(positions) == 1 and len(prompt_ids) > 1 and isinstance(positions[0], list):
            positions = positions[0]  # [seq][pos]
        ranked = [sorted(_candidates(position), key=lambda pair: -pair[1])[:top_k] for position in positions]
        return {
            "prompt_tokens": prompt_ids,
            "prompt_topk_token_ids": [[token for token, _ in pairs] for pairs in ranked],
            "prompt_topk_logprobs": [[logprob for _, logprob in pairs] for pairs in ranked],
        }

    def _sampling(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return sampling_of(kwargs, names=VLLM_NAMES, allowed=VLLM_SAMPLING, engine="vLLM")

    async def _generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        body = {"prompt": {"prompt_token_ids": prompt_ids}, **sampling}
        data = await self._post(f"{self.root_url}/generate", body, kwargs, sampling.get("max_tokens"))
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise ReplyFault(f"not a /generate reply ({error}): {data[:200]!r}") from error


def _field(reply: Mapping[str, Any], name: str) -> list[Any]:
    value = reply.get(name)
    if not isinstance(value, list):
        raise ValueError(
            f"the vLLM /generate reply has no {name!r} list, only {sorted(reply)}; the route must return it"
        )
    return value


def _chosen(position: Position) -> tuple[int, float]:
    """The generated token of one position: its only candidate."""
    return _candidates(position)[0]


def _candidates(position: Position) -> list[tuple[int, float]]:
    """(token id, log-probability) pairs of one position; [] where vLLM gives none (the first prompt token)."""
    if position is None:
        return []
    entries = [position] if isinstance(position, Mapping) else position
    return [
        (int(token), float(value["logprob"] if isinstance(value, Mapping) else value))
        for entry in entries
        for token, value in entry.items()
    ]
