"""An engine by its own account: model, tokenizer, vocabulary, load; and the check that a tokenizer is the engine's.

Ids of another tokenizer are valid numbers, so an engine answers them with nonsense instead of an error. Whatever an
engine does not tell is unknown, and no reason to refuse anything. The load comes from SGLang's `/v1/loads`, or the
Prometheus gauges of SGLang and vLLM.
"""

import logging
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import orjson

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.server_handling.chat_prompt import render
from atroposlib.envs.server_handling.faults import EndpointUnavailable, ReplyFault
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.errors import ConfigError, ModelError, PathError, RequestFault
from atroposlib.type_definitions import JsonObject, Tokenizer

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.transport import Transport

logger = logging.getLogger(__name__)

PROBE = "The sum of 1,234 and 56 is 1290;\n\tdef f(x): return x**2  # naïve ☃ 你好"
"""A text that different tokenizers cut differently."""

ASK_TIMEOUT_S, LOAD_TIMEOUT_S, ECHO_TIMEOUT_S = 5.0, 5.0, 60.0
_OK = 200
_ABOUT = {"sglang": ("/model_info", "/get_model_info"), "vllm": ("/v1/models",)}
_MORE_ABOUT = "/get_server_info"


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """None where the engine does not say."""

    model: str | None = None  # folder or hub name of the weights
    tokenizer: str | None = None  # folder or hub name
    vocabulary: int | None = None  # number of ids it takes, those that only fill up the matrix included
    weights: str | None = None  # name of those that it serves now


async def ask_identity(transport: "Transport", server_type: str, root_url: str) -> EngineIdentity | None:
    """Ask a server that is up who it is; None when it has no route for that.

    Raises:
        EndpointUnavailable: nothing answers.
    """
    for path in _ABOUT[server_type]:
        status, body = await transport.get(root_url + path, timeout_s=ASK_TIMEOUT_S)
        identity = _identity(body) if status == _OK else None
        if identity is not None and identity.vocabulary is None and server_type == "sglang":
            status, more = await transport.get(root_url + _MORE_ABOUT, timeout_s=ASK_TIMEOUT_S)
            further = _identity(more) if status == _OK else None
            return (
                replace(further, weights=identity.weights) if further is not None and further.vocabulary else identity
            )
        if identity is not None:
            return identity
    return None


async def ask_ids(transport: "Transport", server_type: str, root_url: str, model: str, text: str) -> list[int] | None:
    """Ask which ids the engine itself makes of `text`; None when it does not tell.

    Raises:
        EndpointUnavailable, DeadlineFault: nothing answers now.
    """
    if server_type == "vllm":
        url, body = f"{root_url}/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}
    else:
        sampling = {"max_new_tokens": 1, "temperature": 0}
        url = f"{root_url}/generate"
        body = {"text": text, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    try:
        reply = orjson.loads(await transport.post(url, body, deadline_s=ECHO_TIMEOUT_S))
        echo = reply["tokens"] if server_type == "vllm" else reply["meta_info"]["input_token_logprobs"]
        ids = [entry if server_type == "vllm" else entry[1] for entry in echo]
    except (RequestFault, ReplyFault, ValueError, LookupError, TypeError):  # it speaks otherwise
        return None
    return ids if ids and all(type(token) is int for token in ids) else None


def load_for(name: str, configs: Sequence[APIServerConfig]) -> tuple[Tokenizer, str]:
    """The tokenizer of an environment, and its name.

    Args:
        name: the environment's setting. Left at its default, the servers' setting is taken, else what the engine says,
            else the tokenizer of the model that the servers name.

    Raises:
        ModelError: there is no such tokenizer.
    """
    from atroposlib.data.tokenizers import load_tokenizer

    for other in _others(configs) if name == BaseEnvConfig.model_fields["tokenizer_name"].default else ():
        try:
            tokenizer = load_tokenizer(other)
        except (ModelError, PathError) as error:
            logger.info("not the tokenizer of the environment: %s", error)
        else:
            logger.info("tokenizer of the served model: %s", other)
            return tokenizer, other
    return load_tokenizer(name), name


def _others(configs: Sequence[APIServerConfig]) -> list[str]:
    asked = [config for config in configs if config.server_type in _ABOUT and config.base_url]
    named = [config.tokenizer_name for config in asked if config.tokenizer_name not in ("none", "")]
    if named or not asked:
        return named[:1]
    identity = _ask_now(asked[0])
    told = [identity.tokenizer, identity.model] if identity else []
    return list(dict.fromkeys(name for name in (*told, asked[0].model_name) if name and name != "default"))


def refuse_foreign(
    tokenizer: Tokenizer, name: str, base_url: str, identity: EngineIdentity, ids: Sequence[int] | None, text: str
) -> None:
    """Raise ConfigError when a tokenizer is not the engine's; `ids` are the engine's for `text`, None: unknown."""
    base_size = getattr(tokenizer, "vocab_size", None)  # without added tokens, which a model may lack
    is_larger = isinstance(base_size, int) and identity.vocabulary is not None and base_size > identity.vocabulary
    if not is_larger and (ids is None or not is_foreign(tokenizer, ids, text)):
        return
    theirs = identity.tokenizer or identity.model
    sizes = f" ({identity.vocabulary} ids)" if identity.vocabulary else ""
    own = list(tokenizer.encode(text, add_special_tokens=False))
    shown = "" if ids is None else f": a short chat is {_start(ids)} there and {_start(own)} here"
    raise ConfigError(
        f"{base_url} serves {identity.model} with the tokenizer {theirs}{sizes}, but the environment uses the "
        f"tokenizer {name} ({len(tokenizer)} ids){shown}. Set env.tokenizer_name to {theirs}, or base_url "
        "to a server of the model that is meant"
    )


def probe_text(tokenizer: object) -> str:
    """The probe as a prompt of the tokenizer's chat template, so that its special tokens are in it."""
    from jinja2 import TemplateError

    try:
        return render(tokenizer, [{"role": "user", "content": PROBE}])
    except (TemplateError, TypeError, ValueError):  # a template for other messages
        return PROBE


def is_foreign(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> bool:
    """Tell if `ids`, the engine's for `text`, mean something else to `tokenizer`.

    Other cuts of the same text do not count, as releases of one tokenizer may differ in them. But a special token of
    the text must be the same id there and here.
    """
    own = list(tokenizer.encode(text, add_special_tokens=False))
    common = min(len(own), len(ids))  # an engine may add a first token, or say nothing of the first
    if common > len(own) / 2 and list(ids[-common:]) == own[-common:]:
        return False
    marks = set(tokenizer.get_added_vocab().values()) if hasattr(tokenizer, "get_added_vocab") else set()
    if not (set(own) & marks) <= set(ids):
        return True
    try:
        return _squeezed(tokenizer.decode(own)) not in _squeezed(tokenizer.decode(list(ids)))
    except (IndexError, KeyError, TypeError, OverflowError):  # an id that the tokenizer does not have
        return True


def _identity(body: bytes) -> EngineIdentity | None:
    """Of SGLang's model or server info, or vLLM's list of models."""
    try:
        about = orjson.loads(body)
        if isinstance(about, dict) and about.get("object") == "list":
            about = {"model_path": about["data"][0].get("root") or about["data"][0]["id"]}
        if not isinstance(about, dict) or "model_path" not in about:
            return None
    except (ValueError, LookupError, AttributeError, TypeError):
        return None
    model, tokenizer = _text(about.get("model_path")), _text(about.get("tokenizer_path"))
    size = about.get("vocab_size")
    vocabulary = size if type(size) is int and size > 0 else _vocabulary_of(model)
    return EngineIdentity(model, tokenizer or model, vocabulary, _text(about.get("weight_version")))


def _vocabulary_of(model: str | None) -> int | None:
    """By the model's own config, where it is on this machine."""
    from atroposlib.data.tokenizers import padded_vocabulary

    if model is None or "/" not in model or model.endswith(".gguf"):
        return None
    try:
        return padded_vocabulary(model)
    except PathError:
        return None


def _ask_now(config: APIServerConfig) -> EngineIdentity | None:
    """As `ask_identity`, before there is an event loop; None also when nothing answers."""
    root = (config.base_url or "").rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    proxies = [] if root.startswith("https://") else [urllib.request.ProxyHandler({})]  # plain HTTP stays in a cluster
    opener = urllib.request.build_opener(*proxies)
    for path in _ABOUT[config.server_type]:
        try:
            with opener.open(urllib.request.Request(root + path, headers=headers), timeout=ASK_TIMEOUT_S) as reply:
                identity = _identity(reply.read())
        except urllib.error.HTTPError:
            continue
        except (OSError, ValueError):
            return None
        if identity is not None:
            return identity
    return None


def _start(ids: Sequence[int]) -> str:
    return f"[{', '.join(map(str, ids[:6]))}, ...]"


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


# -- load ------------------------------------------------------------------------------------------------------

_GAUGES = {
    "running": ("sglang:num_running_reqs", "vllm:num_requests_running"),
    "queued": ("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
    "retracted": ("sglang:num_retracted_reqs",),
    "tokens_s": ("sglang:gen_throughput",),
    "token_usage": ("sglang:token_usage", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}

_READ = frozenset(name for names in _GAUGES.values() for name in names)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One endpoint's load; None where it does not say. Requests count choices, as the engine schedules them."""

    base_url: str
    running: int | None = None
    queued: int | None = None
    token_usage: float | None = None  # share of the KV cache in use, 0 to 1
    retracted: int | None = None  # requests that lost their KV cache and wait to start again
    slots: int | None = None  # requests that may run at once
    tokens_s: float | None = None  # generated now

    @property
    def is_known(self) -> bool:
        """Tell if the endpoint said anything."""
        return self.running is not None


async def engine_load(transport: "Transport", root_url: str) -> EngineLoad:
    """Ask one engine; an empty EngineLoad when it does not answer or has no such route."""
    for path, read in (("/v1/loads", _from_loads), ("/metrics", _from_metrics)):
        try:
            status, body = await transport.get(root_url + path, timeout_s=LOAD_TIMEOUT_S)
        except EndpointUnavailable:
            return EngineLoad(root_url)
        load = read(root_url, body) if status == 200 else None
        if load is not None:
            return load
    return EngineLoad(root_url)


def _from_loads(base_url: str, body: bytes) -> EngineLoad | None:
    try:
        ranks: list[JsonObject] = orjson.loads(body)["loads"]
        return EngineLoad(
            base_url,
            running=sum(rank["num_running_reqs"] for rank in ranks),
            queued=sum(rank["num_waiting_reqs"] for rank in ranks),
            token_usage=max(rank["token_usage"] for rank in ranks),
            retracted=sum(rank.get("queues", {}).get("retracted", 0) for rank in ranks),
            slots=sum(rank.get("max_running_requests") or 0 for rank in ranks) or None,
            tokens_s=sum(rank["gen_throughput"] for rank in ranks) if "gen_throughput" in ranks[0] else None,
        )
    except (ValueError, KeyError, TypeError):
        return None  # another engine's idea of this route


def _from_metrics(base_url: str, body: bytes) -> EngineLoad | None:
    """Sum of the requests over all ranks, highest cache use of any rank."""
    seen: dict[str, list[float]] = {}
    for line in body.decode("utf-8", "replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _READ:  # of hundreds of lines
            value = _number(line.rpartition(" ")[2])
            if value is not None:
                seen.setdefault(name, []).append(value)
    values = {field: next((seen[name] for name in names if name in seen), None) for field, names in _GAUGES.items()}
    running, queued, retracted, usage = (values[field] for field in ("running", "queued", "retracted", "token_usage"))
    speeds = values["tokens_s"]
    if running is None:
        return None
    return EngineLoad(
        base_url,
        running=int(sum(running)),
        queued=int(sum(queued)) if queued is not None else None,
        token_usage=max(usage) if usage is not None else None,
        retracted=int(sum(retracted)) if retracted is not None else None,
        tokens_s=sum(speeds) if speeds is not None else None,
    )


def _number(text: str) -> float | None:
    """A gauge's value; None for NaN and infinities, which stand for "not measured yet"."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
