"""Requests that change an engine's weights: the same to every engine, and nothing but a success counts."""

import json
from typing import Any

import httpx

from atroposlib.errors import AtroposError
from example_trainer.config import TrainingConfig

_NOT_FOUND = 404


class WeightSyncError(AtroposError, RuntimeError):
    """An engine did not take the weights."""


class Engines:
    """The same request to every engine."""

    def __init__(self, config: TrainingConfig) -> None:
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in config.sync_urls]
        self._client = httpx.Client(timeout=config.engine_timeout_s)

    def post(self, path: str, body: dict[str, Any] | None, *, optional: bool = False) -> None:
        """WeightSyncError unless every engine answers 2xx and does not say `success: false`.

        Args:
            optional: an engine may lack the route.
        """
        for url in self._urls:
            try:
                reply = self._client.post(url + path, json=body)
            except httpx.HTTPError as error:
                raise WeightSyncError(f"POST {url}{path} failed: {type(error).__name__} {error}") from error
            if optional and reply.status_code == _NOT_FOUND:
                continue
            if not reply.is_success or _says_no(reply):
                raise WeightSyncError(f"POST {url}{path} answered {reply.status_code}: {reply.text[:500]}")

    def get(self, path: str) -> dict[str, Any]:
        """What each engine answers, by its URL; WeightSyncError unless all answer 200 with JSON."""
        found = {}
        for url in self._urls:
            try:
                found[url] = self._client.get(url + path).raise_for_status().json()
            except (httpx.HTTPError, json.JSONDecodeError) as error:
                raise WeightSyncError(f"GET {url}{path} failed: {type(error).__name__} {error}") from error
        return found

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()


def _says_no(reply: httpx.Response) -> bool:
    try:
        content = reply.json()
    except json.JSONDecodeError:
        return False
    return isinstance(content, dict) and content.get("success") is False
