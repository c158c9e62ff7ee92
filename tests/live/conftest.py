"""A server that really generates: $ATROPOS_SGLANG_URL, $ATROPOS_VLLM_URL, or else the embedded engine, started here.

ATROPOS_SGLANG_URL=http://127.0.0.1:9000 ATROPOS_SGLANG_MODEL=/path/of/model pytest tests/live
ATROPOS_VLLM_URL=http://127.0.0.1:8000 ATROPOS_VLLM_MODEL=/path/of/model pytest tests/live

vLLM as `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs`.
"""

import os
from collections.abc import Iterator

import pytest

from tests.engines.engine_process import start_engine, stop_engine
from tests.live.live_server import LiveServer, served_name


@pytest.fixture(scope="session")
def live_server() -> Iterator[LiveServer]:
    for kind in ("sglang", "vllm"):
        if url := os.environ.get(f"ATROPOS_{kind.upper()}_URL"):
            yield LiveServer(url, os.environ[f"ATROPOS_{kind.upper()}_MODEL"], kind, served_name(url))
            return
    from atroposlib_engine.models import resolve_model

    tokenizer = str(resolve_model("smollm2-135m").tokenizer_dir)
    process, url = start_engine("--slots", "16", "--context", "512")
    yield LiveServer(url, tokenizer, "embedded", served_name(url))
    stop_engine(process)
