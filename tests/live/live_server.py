"""What the tests ask a real server directly, in the words of its kind."""

from dataclasses import dataclass
from typing import Any, Literal

import httpx

from atroposlib.envs.server_handling.server_baseline import APIServerConfig

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """One choice."""

    reason: str
    version: str | None  # of the weights, where the server says it
    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class LiveServer:
    """Where it is, and the folder of the model it serves. The embedded engine speaks as SGLang does."""

    url: str
    model: str
    kind: Literal["sglang", "vllm", "embedded"]
    model_in_requests: str

    def routes(self) -> set[str]:
        """Paths of its OpenAPI document."""
        return set(httpx.get(f"{self.url}/openapi.json", timeout=TIMEOUT_S).raise_for_status().json()["paths"])

    def load_first_weights(self) -> None:
        """vLLM: whatever was pushed since, serve the model's folder again."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": self.model}}
        _post(f"{self.url}/collective_rpc", body)
        _post(f"{self.url}/reset_prefix_cache", {})

    def client_config(self) -> APIServerConfig:
        """For our clients."""
        server_type = "vllm" if self.kind == "vllm" else "sglang"
        return APIServerConfig(
            server_type=server_type,
            base_url=f"{self.url}/v1",
            model_name=self.model_in_requests,
            tokenizer_name=self.model,
        )

    def request(self, prompt: list[int], new_tokens: int, n: int = 1) -> tuple[str, dict[str, Any]]:
        """URL and body of a request for exactly that number of tokens, with their log-probabilities."""
        sampling = {"temperature": 1.0, "ignore_eos": True, "n": n}
        if self.kind == "vllm":
            asked = {"logprobs": 0, "return_token_ids": True, "return_weight_versions": True}
            body = {"model": self.model_in_requests, "prompt": prompt, "max_tokens": new_tokens, **asked, **sampling}
            return f"{self.url}/v1/completions", body
        body = {"input_ids": prompt, "sampling_params": {**sampling, "max_new_tokens": new_tokens}}
        return f"{self.url}/generate", {**body, "return_logprob": True}

    def answers(self, reply: Any) -> list[Answer]:
        """The choices of the reply to such a request."""
        if self.kind == "vllm":
            return [_vllm_answer(choice) for choice in reply["choices"]]
        return [_sglang_answer(one) for one in (reply if isinstance(reply, list) else [reply])]

    def score(self, tokens: list[int]) -> list[float | None]:
        """Log-probability of every token given those before it, as the server scores a finished sequence."""
        if self.kind == "vllm":
            body = {"model": self.model_in_requests, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
            positions = _post(f"{self.url}/v1/completions", body)["choices"][0]["prompt_logprobs"]
            return [
                None if position is None else position[str(token)]["logprob"]
                for token, position in zip(tokens, positions, strict=True)
            ]
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"input_ids": tokens, "return_logprob": True, "logprob_start_len": 0, "sampling_params": sampling}
        return [entry[0] for entry in _post(f"{self.url}/generate", body)["meta_info"]["input_token_logprobs"]]


def served_name(url: str) -> str:
    """What the server calls its model."""
    return httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).raise_for_status().json()["data"][0]["id"]


def _post(url: str, body: dict[str, Any]) -> Any:
    return httpx.post(url, json=body, timeout=TIMEOUT_S).raise_for_status().json()


def _vllm_answer(choice: dict[str, Any]) -> Answer:
    spans = choice.get("weight_versions") or [{"version": None}]
    return Answer(
        choice["finish_reason"], spans[-1]["version"], choice["token_ids"], choice["logprobs"]["token_logprobs"]
    )


def _sglang_answer(one: dict[str, Any]) -> Answer:
    info = one["meta_info"]
    logprobs = [logprob for logprob, *_ in info["output_token_logprobs"]]
    return Answer(info["finish_reason"]["type"], info["weight_version"], one["output_ids"], logprobs)
