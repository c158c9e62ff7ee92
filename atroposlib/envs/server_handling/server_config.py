"""Addresses of the inference servers, and the limits of their use."""

from typing import Literal

from pydantic import BaseModel, Field, PositiveFloat


class ServerBaseline(BaseModel):
    """Settings of every server. Given alone, the endpoints are discovered (SLURM nodes, or local ports)."""

    timeout: int = Field(
        default=1200,
        description="Seconds a request may take beyond its generation time; a request for many tokens gets more.",
    )
    num_max_requests_at_once: int = Field(
        default=512, description="Requests in flight to one server, training rollouts."
    )
    num_requests_for_eval: int = Field(default=64, description="Requests in flight to one server, evaluations.")
    model_name: str = Field(default="default", description="Model name sent with every request.")
    rolling_buffer_length: int = Field(default=1000, description="Request timings kept per server for the metrics.")
    server_type: Literal["openai", "trl", "sglang", "vllm"] = Field(
        default="openai", description="Protocol of the server: openai (any OpenAI-style endpoint), sglang, vllm or trl."
    )
    tokenizer_name: str = Field(default="none", description="Tokenizer of the model; none: the same as model_name.")
    tool_parser: str | None = Field(
        default=None,
        description="How the model writes tool calls (hermes): managed servers read the calls themselves. "
        "null: they refuse tools=.",
    )
    outage_timeout_s: PositiveFloat = Field(
        default=3600.0, description="Seconds for which a request, and a run, waits while no server is up."
    )


class APIServerConfig(ServerBaseline):
    """One inference server."""

    api_key: str | None = Field(default="", description="Sent as a Bearer token when not empty.")
    base_url: str | None = Field(
        default="", description="Address, such as http://localhost:9001/v1; null or empty: the official OpenAI API."
    )
    n_kwarg_is_ignored: bool = Field(
        default=False, description="The server gives one choice whatever n is; send n requests. Noticed by itself."
    )
    health_check: bool = Field(
        default=True, description="Ask the server's health (free of charge) after a failed request."
    )


OpenaiConfig = APIServerConfig
