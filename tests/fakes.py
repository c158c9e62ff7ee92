"""Stand-ins that every test may use: a byte tokenizer and a scripted inference server, no network, no model."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

from atroposlib.envs.server_handling.server_baseline import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_harness import create_chat_completion, create_completion
from atroposlib.rollouts.trace import EngineReply, current_trace, finish_reason_of

BOS, EOS, START = 256, 257, 258
SPECIALS = {"<bos>": BOS, "<|im_end|>": EOS, "<|im_start|>": START}


class FakeTokenizer:
    """One token per UTF-8 byte, plus `<bos>`, `<|im_end|>` and `<|im_start|>`; looks like a Hugging Face tokenizer.

    `decode` is the inverse of `encode`. With `batch_encoding=True`, `apply_chat_template(tokenize=True)` gives a
    mapping with `input_ids`, as transformers 5 does, else a list, as transformers 4 does.
    """

    bos_token, bos_token_id = "<bos>", BOS
    eos_token, eos_token_id = "<|im_end|>", EOS
    pad_token, pad_token_id = "<|im_end|>", EOS
    all_special_ids = tuple(SPECIALS.values())
    chat_template = "chatml"
    model_max_length = 4096

    def __init__(self, *, add_bos: bool = False, batch_encoding: bool = False) -> None:
        self.add_bos = add_bos
        self.batch_encoding = batch_encoding

    def __len__(self) -> int:
        return 256 + len(SPECIALS)

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        ids = [BOS] if self.add_bos and add_special_tokens else []
        for piece in re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", text):
            ids += [SPECIALS[piece]] if piece in SPECIALS else piece.encode()
        return ids

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        names = {token: name for name, token in SPECIALS.items()}
        data = b""
        for token in [token_ids] if isinstance(token_ids, int) else token_ids:
            if token < 256:
                data += bytes([token])
            elif not skip_special_tokens:
                data += names.get(token, "").encode()  # as transformers, which has no word for unknown ids
        return data.decode("utf-8", "replace")

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        ids = self.encode(text, add_special_tokens)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> Any:
        text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in conversation)
        if add_generation_prompt:
            text += "<|im_start|>assistant\n"
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if self.batch_encoding else ids


Script = str | Sequence[str] | Callable[[str], str]


class FakeServer:
    """Answers from a script and remembers what it was asked. Has the public surface of `APIServer`.

    Args:
        script: one text for every choice; a list to take one by one, around and around; or a function of the prompt.
        finish_reason: of every choice; "stop" ends the ids with EOS.
        faults: raised first, one per request.
    """

    def __init__(
        self,
        script: Script = "ok",
        *,
        tokenizer: FakeTokenizer | None = None,
        finish_reason: str = "stop",
        faults: Sequence[Exception] = (),
        weight_version: str = "default",
    ) -> None:
        self.script = script
        self.tokenizer = tokenizer or FakeTokenizer()
        self.finish_reason = finish_reason
        self.faults = list(faults)
        self.weight_version = weight_version
        self.requests: list[dict[str, Any]] = []
        self.answered = 0
        self.config = APIServerConfig(model_name="fake", base_url="http://fake/v1", health_check=False)
        self.sem = AsyncSemWithAdaptiveWeight(512)
        self.eval_sem = AsyncSemWithAdaptiveWeight(64)
        self.server_healthy = True

    async def chat_completion(self, **kwargs: Any) -> Any:
        prompt = self.tokenizer.apply_chat_template(kwargs["messages"], tokenize=False, add_generation_prompt=True)
        return create_chat_completion(self._answer(prompt, kwargs), finish_reason=self.finish_reason)

    async def completion(self, **kwargs: Any) -> Any:
        return create_completion(self._answer(kwargs["prompt"], kwargs), finish_reason=self.finish_reason)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> tuple[list, list, list, list]:
        ids = kwargs.get("input_ids") or self.tokenizer.encode(kwargs["prompt"])
        end = [EOS] if self.finish_reason == "stop" else []
        await asyncio.sleep(0)  # other requests come in between, as with a real server
        outputs = [
            self.tokenizer.encode(text, add_special_tokens=False) + end
            for text in self._answer(self.tokenizer.decode(ids), kwargs)
        ]
        return ids, outputs, [[-0.5] * len(output) for output in outputs], [self.finish_reason] * len(outputs)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        self.requests.append(kwargs)
        ids = kwargs.get("input_ids") or self.tokenizer.encode(kwargs["prompt"])
        return {
            "prompt_tokens": ids,
            "prompt_topk_token_ids": [[token] for token in ids],
            "prompt_topk_logprobs": [[-0.5] for _ in ids],
        }

    async def update_weight(self, weight: float) -> None:
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)

    async def wandb_metrics(self, metrics_dict: dict[str, Any] | None, server_name: str | None) -> dict[str, Any]:
        return metrics_dict or {}

    def _answer(self, prompt: str, kwargs: dict[str, Any]) -> list[str]:
        """The texts of the n choices, told to the rollout's trace as a real client does."""
        self.requests.append(kwargs)
        if self.faults:
            raise self.faults.pop(0)
        texts = [self._next_text(prompt) for _ in range(kwargs.get("n") or 1)]
        trace = current_trace()
        if trace is not None:
            trace.record(
                EngineReply(
                    finish_reasons=[finish_reason_of(self.finish_reason)] * len(texts),
                    prompt_tokens=len(prompt),
                    completion_tokens=sum(map(len, texts)),
                    model=self.config.model_name,
                    base_url=self.config.base_url,
                    weight_version=self.weight_version,
                    sampling={key: kwargs[key] for key in ("temperature", "max_tokens", "n") if key in kwargs},
                )
            )
        return texts

    def _next_text(self, prompt: str) -> str:
        self.answered += 1
        if callable(self.script):
            return self.script(prompt)
        return self.script if isinstance(self.script, str) else self.script[(self.answered - 1) % len(self.script)]
