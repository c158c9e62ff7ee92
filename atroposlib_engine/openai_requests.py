"""From OpenAI's chat and completion bodies to sequences: template, sampling parameters, log-probabilities wanted."""

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from atroposlib.errors import RequestFault
from atroposlib.type_definitions import JsonObject
from atroposlib_engine.engine import Engine
from atroposlib_engine.generation import Generation, LogprobWish
from atroposlib_engine.requests import build_generations, encode_prompts, integer
from atroposlib_engine.sampling import SamplingParams, parse_sampling

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default, kept by SGLang
_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n",
    "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim", "seed", "logit_bias",
)  # fmt: skip


def chat_generations(body: JsonObject, engine: Engine) -> list[Generation]:
    """The n sequences of a chat body."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestFault("Messages cannot be empty.")
    _refuse_grammar(body)
    prompt = engine.llama.vocabulary.encode(render_chat(messages, body, engine), begin=False)
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    wish = LogprobWish(output=bool(body.get("logprobs")), top=integer(body.get("top_logprobs"), "top_logprobs"))
    return build_generations(engine, prompt, _sampling(body, limit), wish, body.get("rid"))


def completion_generations(body: JsonObject, engine: Engine) -> list[Generation]:
    """The sequences of a completion body, prompt by prompt."""
    if body.get("prompt") in (None, "", []):
        raise RequestFault("prompt is missing.")
    _refuse_grammar(body)
    prompts, _ = encode_prompts(body["prompt"], engine)
    top = body.get("logprobs")
    start = 0 if body.get("echo") else -1
    wish = LogprobWish(output=top is not None, prompt_from=start, top=integer(top, "logprobs"))
    params = _sampling(body, body.get("max_tokens", _COMPLETION_MAX_TOKENS))
    return [
        generation
        for prompt in prompts
        for generation in build_generations(engine, prompt, params, wish, body.get("rid"))
    ]


def render_chat(messages: list[JsonObject], body: JsonObject, engine: Engine) -> str:
    """The prompt text of a conversation, by the model's own template.

    Raises:
        RequestFault: the model has no template, or the messages do not fit it.
    """
    if engine.llama.chat_template is None:
        raise RequestFault("this model has no chat template; use /generate or /v1/completions.")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_in_template
    bos, eos = engine.llama.bos, engine.llama.eos
    try:
        return environment.from_string(engine.llama.chat_template).render(
            messages=[_plain_message(message) for message in messages],
            tools=body.get("tools"),
            add_generation_prompt=True,
            bos_token=bos,
            eos_token=eos,
            **(body.get("chat_template_kwargs") or {}),
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise RequestFault(f"the messages do not fit the model's chat template: {error}.") from error


def _plain_message(message: object) -> JsonObject:
    """A message whose content is one text; parts of kind text are joined."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestFault(f"every message needs a role, got {str(message)[:80]}.")
    content = message.get("content")
    if isinstance(content, list):
        kinds = {part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content}
        if kinds != {"text"}:
            raise RequestFault(f"message content has parts of kind {sorted(map(str, kinds))}; this model reads text.")
        content = "".join(str(part.get("text") or "") for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestFault(f"message content must be text, got {type(content).__name__}.")
    return {**message, "content": content or ""}


def _sampling(body: JsonObject, max_tokens: object) -> SamplingParams:
    named = {name: body[name] for name in _SAME_NAME if body.get(name) is not None}
    return parse_sampling({**named, "max_new_tokens": max_tokens, "min_new_tokens": body.get("min_tokens", 0)})


def _refuse_grammar(body: JsonObject) -> None:
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type", "text") != "text":
        raise RequestFault("response_format is not supported by the embedded engine; use SGLang for it.")


def _raise_in_template(message: str) -> None:
    raise jinja2.TemplateError(message)
