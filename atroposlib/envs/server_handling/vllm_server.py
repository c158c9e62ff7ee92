"""Client of a vLLM server: stock `vllm serve`, or upstream's own server with a `/generate` route."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from atroposlib.envs.server_handling.faults import (
    UNAVAILABLE,
    BadReply,
    EndpointUnavailable,
    ReplyFault,
    fault_in_reply,
    read_json,
)
from atroposlib.envs.server_handling.sampling import GRAMMARS, VLLM_NAMES, VLLM_SAMPLING, GenerationRequest, sampling_of
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ReasoningConfig, TokensAndLogprobs
from atroposlib.envs.server_handling.server_config import resolve_openai_configs
from atroposlib.envs.server_handling.token_server import TokenServer
from atroposlib.rollouts.trace import EngineReply, finish_reason_of, oldest_first
from atroposlib.type_definitions import PROMPT_LOGPROB, FinishReason, Json, JsonObject

__all__ = ["APIServerConfig", "ReasoningConfig", "VLLMServer", "resolve_openai_configs"]

_NOT_FOUND = 404
Result = TypeVar("Result")

Position = Mapping[str, Json] | Sequence[Mapping[str, Json]] | None
"""Candidates of one position: {token id: log-probability or {"logprob": x}}, or a list of such objects."""


@dataclass(frozen=True, slots=True)
class Choices:
    """n choices of one prompt."""

    ids: list[list[int]]  # [n][T]
    logprobs: list[list[float]]  # [n][T]
    finish_reasons: list[FinishReason]
    weight_version: str | None = None  # of the oldest token, so that no reply counts as fresher than it is

    def flaw(self, n: int) -> str | None:
        """Say what is not as it should be: n choices, in which every token has an entry for its log-probability."""
        if not len(self.ids) == len(self.logprobs) == len(self.finish_reasons) == n:
            return f"{len(self.ids)} choices for n={n}"
        for index, (ids, logprobs) in enumerate(zip(self.ids, self.logprobs, strict=True)):
            if any(type(token) is not int for token in ids):
                return f"no token ids in choice {index}"
            if len(ids) != len(logprobs):
                return f"{len(ids)} token ids and {len(logprobs)} logprobs in choice {index}"
        return None


def generate_choices(reply: Mapping[str, Json]) -> Choices:
    """Of `/generate`: one position per token, whose only candidate is the token. ValueError: it holds no such lists."""
    choices = [[candidates(position)[0] for position in positions] for positions in _list(reply, "logprobs")]
    return Choices(
        ids=[[token for token, _ in choice] for choice in choices],
        logprobs=[_known([logprob for _, logprob in choice]) for choice in choices],
        finish_reasons=[finish_reason_of(reason) for reason in _list(reply, "finish_reasons")],
    )


def completion_choices(reply: Mapping[str, Json]) -> Choices:
    """Of `/v1/completions`. ValueError: ids or log-probabilities are missing, as in vLLM before 0.10.2."""
    choices = _list(reply, "choices")
    first_spans = [spans[0] for choice in choices if (spans := choice.get("weight_versions"))]
    return Choices(
        ids=[_list(choice, "token_ids") for choice in choices],
        logprobs=[_known(_list(choice.get("logprobs") or {}, "token_logprobs")) for choice in choices],
        finish_reasons=[finish_reason_of(choice.get("finish_reason")) for choice in choices],
        weight_version=oldest_first(span["version"] for span in first_spans)[0] if first_spans else None,
    )


def prompt_positions(reply: Mapping[str, Json]) -> list[Position]:
    """[P] positions of `prompt_logprobs`, of either route. ValueError: there are none."""
    positions = _list((reply.get("choices") or [reply])[0], "prompt_logprobs")
    if len(positions) == 1 and isinstance(positions[0], list):
        return positions[0]  # [seq][pos]
    return positions


def candidates(position: Position) -> list[tuple[int, float]]:
    """(token id, log-probability) pairs of one position; [] where vLLM gives none (the first prompt token)."""
    if position is None:
        return []
    entries = [position] if isinstance(position, Mapping) else position
    return [
        (int(token), float(value["logprob"] if isinstance(value, Mapping) else value))
        for entry in entries
        for token, value in entry.items()
    ]


def _known(logprobs: list[float | None]) -> list[float]:
    """`PROMPT_LOGPROB` where vLLM gave none, or NaN or infinity."""
    return [PROMPT_LOGPROB if logprob is None or not math.isfinite(logprob) else logprob for logprob in logprobs]


class MissingListError(ValueError):
    """The server does not give what was asked for, so asking again is of no use."""


def _list(reply: Mapping[str, object], name: str) -> list[Json]:
    value = reply.get(name)
    if not isinstance(value, list):
        raise MissingListError(f"the vLLM reply has no {name!r} list, only {sorted(reply)}; the route must return it")
    return value


class VLLMServer(TokenServer):
    """One vLLM server."""

    _is_stock: bool | None = None  # None: no reply yet

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: object) -> TokensAndLogprobs:
        request = GenerationRequest(kwargs)
        prompt_ids = await self._prompt_ids(request)
        sampling = {**self._sampling(request), "logprobs": 0}
        if "max_tokens" not in sampling:  # vLLM would stop after 16
            room = await self._room_for(len(prompt_ids))
            sampling |= {} if room is None else {"max_tokens": room}
        reply = await self._ask(prompt_ids, sampling, request)
        choices = self._choices(reply, sampling.get("n", 1))
        self._note_generated(choices.ids)
        self._record(
            EngineReply(
                finish_reasons=choices.finish_reasons,
                prompt_tokens=len(prompt_ids),
                completion_tokens=sum(map(len, choices.ids)),
                model=request.model,
                base_url=self.root_url,
                weight_version=choices.weight_version,
                sampling=sampling,
            )
        )
        return prompt_ids, choices.ids, choices.logprobs, list(choices.finish_reasons)

    async def _get_logprobs_wrapper(self, **kwargs: object) -> JsonObject:
        request = GenerationRequest({"max_tokens": 1, **kwargs})
        prompt_ids, top_k = await self._prompt_ids(request), request.top_k
        sampling = {**self._sampling(request.without("top_k", "top_logprobs")), "prompt_logprobs": top_k}
        sampling |= {"n": 1, "temperature": 0.0, "top_p": 1.0}
        reply = await self._ask(prompt_ids, sampling, request)
        positions = self._read(lambda reply: list(map(candidates, prompt_positions(reply))), reply)
        if len(positions) != len(prompt_ids):
            raise BadReply(f"{self.root_url} gave prompt_logprobs for {len(positions)} of {len(prompt_ids)} tokens")
        ranked = [sorted(pairs, key=lambda pair: -pair[1])[:top_k] for pairs in positions]
        return {
            "prompt_tokens": prompt_ids,
            "prompt_logprobs": [dict(pairs).get(token) for token, pairs in zip(prompt_ids, positions, strict=True)],
            "prompt_topk_token_ids": [[token for token, _ in pairs] for pairs in ranked],
            "prompt_topk_logprobs": [[logprob for _, logprob in pairs] for pairs in ranked],
        }

    def _choices(self, reply: JsonObject, n: int) -> Choices:
        choices = self._read(completion_choices if self._is_stock else generate_choices, reply)
        if flaw := choices.flaw(n):
            raise BadReply(f"{self.root_url} gave {flaw}: {str(reply)[:500]}")
        return choices

    def _read(self, read: Callable[[JsonObject], Result], reply: JsonObject) -> Result:
        """Return what `read` makes of a reply; BadReply where it has null or the like in place of something."""
        try:
            return read(reply)
        except MissingListError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadReply(f"{self.root_url} gave an unreadable reply ({error!r}): {str(reply)[:500]}") from error

    def _sampling(self, request: GenerationRequest) -> JsonObject:
        options = request.options
        grammar = {GRAMMARS[name]: options[name] for name in options if name in GRAMMARS and options[name] is not None}
        options = {name: value for name, value in options.items() if name not in GRAMMARS}
        options |= {"structured_outputs": grammar} if grammar else {}
        return sampling_of(options, names=VLLM_NAMES, allowed=VLLM_SAMPLING, engine="vLLM")

    async def _ask(self, prompt_ids: list[int], sampling: JsonObject, request: GenerationRequest) -> JsonObject:
        """The reply of the route that this server has. A server without `/generate` is stock vLLM."""
        is_stock = self._is_stock
        if is_stock is None:
            status, _ = await self.transport.get(f"{self.root_url}/generate", timeout_s=30)
            if status in UNAVAILABLE:  # a gateway whose server is not up yet
                raise EndpointUnavailable(f"GET {self.root_url}/generate answered {status}")
            is_stock = status == _NOT_FOUND
        if is_stock:
            url = f"{self.openai_url}/completions"
            model = request.model or self.config.model_name  # a LoRA adapter is chosen by its name
            asked = {"return_token_ids": True, "return_weight_versions": True}  # older versions ignore the second
            body = {"model": model, "prompt": prompt_ids, **asked, **sampling}
        else:
            url, body = f"{self.root_url}/generate", {"prompt": {"prompt_token_ids": prompt_ids}, **sampling}
        data = await self._post(url, body, request, sampling.get("max_tokens"))
        reply = read_json(data)
        if fault := fault_in_reply(url, reply):
            raise fault
        if not isinstance(reply, dict) or reply.get("object") == "error":
            raise ReplyFault(f"{url} answered an error as if all were well: {data[:500]!r}")
        self._is_stock = is_stock  # only now is it sure: a gateway whose server is not up yet may say 404, too
        return reply
