"""For tests of environments: an engine that says what you want, a tokenizer made on the spot, and one run of both.

    def test_right_and_wrong_answers_are_told_apart(tmp_path):
        groups = roll_out(AdditionEnv, lambda prompt: ["\\\\boxed{42}", "no idea"], tmp_path)
        assert ...

No model, no GPU, no network but loopback.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from aiohttp import web

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.cli import main as run_environment
from atroposlib.paths import expand_path
from atroposlib.type_definitions import Json, JsonObject

Answer = Callable[[str], str | Sequence[str]]
"""From the prompt's text to what the model says: one text for every response, or texts that take turns."""

_LOGPROB = -0.25
_NEXT_LOGPROB = -1.75
"""From one token of a prompt's top-k to the next; all of them together stay below 1."""
_SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] or '' }}{% for call in m['tool_calls'] or [] %}{{ '<tool_call>\n' + call['function'] | tojson + "
    "'\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> Path:
    """Make a tokenizer of one token a byte with a ChatML template that knows tools; returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    made.add_special_tokens(list(_SPECIALS))
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"vocab_size": made.get_vocab_size()}))
    return folder


class ScriptedEngine:
    """An engine whose answers a function gives: `/generate` as SGLang has it, and chat, on a free loopback port.

    Attributes:
        url: without /v1.
        prompts: the text of every prompt so far.
    """

    def __init__(self, answer: Answer, tokenizer: Path) -> None:
        self.prompts: list[str] = []
        self.url = ""
        self._answer = answer
        self._folder = tokenizer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted engine", daemon=True)

    def __enter__(self) -> "ScriptedEngine":
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    @property
    def flags(self) -> list[str]:
        """Return the flags with which an environment uses this engine."""
        server = {"server_type": "sglang", "model_name": "scripted", "api_key": "x", "base_url": f"{self.url}/v1"}
        named = {**server, "tokenizer_name": str(self._folder)}
        flags = [text for name, value in named.items() for text in (f"--openai.{name}", value)]
        return [*flags, "--env.tokenizer_name", str(self._folder), "--env.use_wandb", "false"]

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted"}]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids, sampling = body["input_ids"], body.get("sampling_params") or {}
        texts = self._answers(self._tokenizer.decode(ids, skip_special_tokens=False), sampling.get("n") or 1)
        replies = [self._reply(text, len(ids), sampling) for text in texts]
        if body.get("return_logprob") and (start := body.get("logprob_start_len", -1)) >= 0:
            for reply in replies:
                reply["meta_info"] |= _of_prompt(ids[start:], body.get("top_logprobs_num") or 0)
        return web.json_response(replies[0] if len(replies) == 1 else replies)

    async def _chat(self, request: web.Request) -> web.Response:
        from jinja2 import Template

        body = await request.json()
        given = {"messages": body["messages"], "tools": body.get("tools"), "add_generation_prompt": True}
        texts = self._answers(Template(_TEMPLATE).render(given), body.get("n") or 1)
        messages = [{"role": "assistant", "content": text} for text in texts]
        choices = [{"index": n, "message": said, "finish_reason": "stop"} for n, said in enumerate(messages)]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        facts = {"id": "scripted", "object": "chat.completion", "created": 0, "model": "scripted", "usage": usage}
        return web.json_response({**facts, "choices": choices})

    def _answers(self, prompt: str, count: int) -> list[str]:
        self.prompts.append(prompt)
        said = self._answer(prompt)
        texts = [said] if isinstance(said, str) else list(said)
        return [texts[n % len(texts)] for n in range(count)]

    def _reply(self, text: str, prompt_tokens: int, sampling: Mapping[str, Json]) -> JsonObject:
        """Return a reply as SGLang gives it: one that a stop string ends has it in its ids, and not in its text."""
        matched: int | str | None = self._tokenizer.token_to_id("<|im_end|>")
        stops = sampling.get("stop") or ()
        places = {text.find(stop): stop for stop in ([stops] if isinstance(stops, str) else stops) if stop in text}
        ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, matched]
        if places:
            place, stop = min(places.items())
            matched, ids = stop, self._tokenizer.encode(text[:place] + stop, add_special_tokens=False).ids
            text = text[:place]
        most = sampling.get("max_new_tokens")
        is_cut = most is not None and len(ids) > most
        reason = {"type": "length", "length": most} if is_cut else {"type": "stop", "matched": matched}
        ids = ids[:most]
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                "finish_reason": reason,
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(ids),
                "output_token_logprobs": [[_LOGPROB, token, None] for token in ids],
            },
        }


def _of_prompt(ids: Sequence[int], top_k: int) -> JsonObject:
    """Return what SGLang says of a prompt: nothing of its first token, and of each other that it was the likeliest."""
    top = [[[_LOGPROB + n * _NEXT_LOGPROB, token + n, None] for n in range(top_k)] for token in ids[1:]]
    given = [[_LOGPROB, token, None] for token in ids[1:]]
    return {
        "input_token_logprobs": [[None, token, None] for token in ids[:1]] + given,
        "input_top_logprobs": [None for _ in ids[:1]] + top,
    }


def roll_out(
    env_cls: type[BaseEnv], answer: Answer, folder: Path, *, groups: int = 1, settings: Sequence[str] = ()
) -> list[JsonObject]:
    """Run an environment's `process` mode against scripted answers and return the groups it recorded.

    Args:
        answer: from the prompt's text to what the model says.
        folder: for the tokenizer and the rollouts.
        settings: further flags, such as `"--env.group_size", "4"`.

    Raises:
        AssertionError: the run did not end with exit code 0.
    """
    rollouts = expand_path(str(folder / "rollouts.jsonl"), what="folder")
    with ScriptedEngine(answer, write_tokenizer(folder / "tokenizer")) as engine:
        limits = ["--env.total_steps", str(groups), "--env.data_path_to_save_groups", str(rollouts)]
        code = run_environment(env_cls, ["process", *engine.flags, *limits, *settings])
    assert code == 0, f"{env_cls.__name__} process ended with exit code {code}; its log says why"
    return [json.loads(line) for line in rollouts.read_text("utf-8").splitlines()]
