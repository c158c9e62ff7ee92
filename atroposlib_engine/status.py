"""The engine's state for others to read: models, server state, load, Prometheus metrics."""

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from atroposlib.type_definitions import JsonObject
from atroposlib_engine.engine import Engine
from atroposlib_engine.http import JsonResponse

PROTOCOL_VERSION = "0.5.11"  # the SGLang release whose replies the engine follows
_DEPRECATED = "Endpoint '/get_weight_version' or '/weight_version' is deprecated. Please use '/model_info' instead."
Handler = Callable[[Request], Awaitable[Response]]


def routes(engine: Engine) -> list[tuple[str, Handler, list[str]]]:
    """(path, handler, methods) of the read-only routes."""
    created = int(time.time())

    def answering(make: Callable[[], object]) -> Handler:
        async def handler(_request: Request) -> Response:
            return JsonResponse(make())

        return handler

    async def metrics(_request: Request) -> Response:
        return PlainTextResponse(metrics_text(engine), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def weight_version(_request: Request) -> Response:
        body = {"object": "error", "message": _DEPRECATED, "type": "404", "param": None, "code": 404}
        return JsonResponse(body, status_code=404)

    get = ["GET"]
    return [
        ("/v1/models", answering(lambda: models(engine, created)), get),
        ("/model_info", answering(lambda: model_info(engine)), get),
        ("/get_model_info", answering(lambda: model_info(engine)), get),
        ("/server_info", answering(lambda: server_info(engine)), get),
        ("/get_server_info", answering(lambda: server_info(engine)), get),
        ("/v1/loads", answering(lambda: loads(engine)), get),
        ("/get_load", answering(lambda: load(engine)), get),
        ("/metrics", metrics, get),
        ("/weight_version", weight_version, get),
        ("/get_weight_version", weight_version, get),
    ]


def models(engine: Engine, created: int) -> JsonObject:
    entry = {
        "id": engine.model_name,
        "object": "model",
        "created": created,
        "owned_by": "sglang",
        "root": engine.model_name,
        "parent": None,
        "max_model_len": engine.llama.context,
    }
    return {"object": "list", "data": [entry]}


def model_info(engine: Engine) -> JsonObject:
    return {
        "model_path": engine.model_path,
        "tokenizer_path": engine.tokenizer_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": engine.scheduler.weight_version,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }


def server_info(engine: Engine) -> JsonObject:
    """The keys that clients read; a real SGLang gives some 370."""
    version = engine.scheduler.weight_version
    state = {
        "effective_max_running_requests_per_dp": engine.llama.slots,
        "last_gen_throughput": engine.scheduler.counters.tokens_per_s,
        "max_running_requests": engine.llama.slots,
        "weight_version": version,
    }
    return {
        "model_path": engine.model_path,
        "served_model_name": engine.model_name,
        "tokenizer_path": engine.tokenizer_path,
        "max_running_requests": engine.llama.slots,
        "weight_version": version,
        "tp_size": 1,
        "dp_size": 1,
        "enable_metrics": True,
        "max_total_num_tokens": engine.llama.slots * engine.llama.context,
        "version": PROTOCOL_VERSION,
        "internal_states": [state],
        "status": "ready" if engine.fault is None else "failed",
        "max_req_input_len": engine.llama.context - 1,
        "engine": "atroposlib embedded (llama.cpp)",
    }


def _load(engine: Engine) -> JsonObject:
    """The load under SGLang's names, in the order of `/v1/loads`."""
    scheduler, counters = engine.scheduler, engine.scheduler.counters
    used, capacity = scheduler.used_tokens, engine.llama.slots * engine.llama.context
    return {
        "num_running_reqs": len(scheduler.running),
        "num_waiting_reqs": len(scheduler.waiting),
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": capacity,
        "token_usage": used / capacity,
        "gen_throughput": round(counters.tokens_per_s, 2),
        "cache_hit_rate": counters.cached_tokens / counters.prompt_tokens if counters.prompt_tokens else 0.0,
        "utilization": len(scheduler.running) / engine.llama.slots,
    }


def loads(engine: Engine) -> JsonObject:
    one = _load(engine)
    running, waiting, used = one["num_running_reqs"], one["num_waiting_reqs"], one["num_used_tokens"]
    one |= {
        "max_running_requests": engine.llama.slots,
        "queues": {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0},
        "num_total_reqs": running + waiting,
    }
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": PROTOCOL_VERSION,
        "dp_rank_count": 1,
        "loads": [one],
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "total_used_tokens": used,
            "total_tokens": used,
            "avg_token_usage": one["token_usage"],
            "avg_throughput": one["gen_throughput"],
            "avg_utilization": one["utilization"],
        },
    }


def load(engine: Engine) -> list[JsonObject]:
    scheduler = engine.scheduler
    waiting = list(scheduler.waiting)
    return [
        {
            "dp_rank": None,
            "num_reqs": len(scheduler.running) + len(waiting),
            "num_waiting_reqs": len(waiting),
            "num_tokens": scheduler.used_tokens,
            "num_pending_tokens": sum(len(generation.tokens) for generation in waiting),
            "ts_tic": time.monotonic(),
        }
    ]


def metrics_text(engine: Engine) -> str:
    """Prometheus exposition under SGLang's names."""
    counters, shared = engine.scheduler.counters, _load(engine)
    gauges = {name: value for name, value in shared.items() if name not in ("num_waiting_reqs", "num_total_tokens")}
    gauges |= {
        "num_queue_reqs": shared["num_waiting_reqs"],
        "full_token_usage": gauges["token_usage"],
        "context_len": engine.llama.context,
    }
    totals = {
        "prompt_tokens_total": counters.prompt_tokens,
        "generation_tokens_total": counters.generated_tokens,
        "cached_tokens_total": counters.cached_tokens,
        "num_requests_total": counters.requests,
        "num_aborted_requests_total": counters.aborted,
    }
    label = f'{{engine_type="unified",model_name="{engine.model_name}",pp_rank="0",tp_rank="0"}}'
    lines = []
    for kind, values in (("gauge", gauges), ("counter", totals)):
        for name, value in values.items():
            lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{label} {float(value)}"]
    return "\n".join(lines) + "\n"
