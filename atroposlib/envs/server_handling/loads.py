"""The load of an engine, by its own account: SGLang's `/v1/loads`, or the Prometheus gauges of SGLang and vLLM."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from atroposlib.envs.server_handling.faults import EndpointUnavailable
from atroposlib.type_definitions import JsonObject

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.transport import Transport

LOAD_TIMEOUT_S = 5.0

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
