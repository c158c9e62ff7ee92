"""A server that really generates: SGLang at $ATROPOS_SGLANG_URL, or else the embedded engine, started here.

ATROPOS_SGLANG_URL=http://127.0.0.1:9000 ATROPOS_SGLANG_MODEL=/path/of/model pytest tests/live
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.engines.engine_process import start_engine, stop_engine


@dataclass(frozen=True)
class LiveServer:
    """Where it is, and the folder of the model it serves."""

    url: str
    model: str
    is_sglang: bool


@pytest.fixture(scope="session")
def live_server() -> Iterator[LiveServer]:
    url = os.environ.get("ATROPOS_SGLANG_URL")
    if url:
        yield LiveServer(url.rstrip("/"), os.environ["ATROPOS_SGLANG_MODEL"], True)
        return
    from atroposlib.engines.models import resolve_model

    tokenizer = str(resolve_model("smollm2-135m").tokenizer_dir)
    process, url = start_engine("--slots", "16", "--context", "512")
    yield LiveServer(url, tokenizer, False)
    stop_engine(process)
