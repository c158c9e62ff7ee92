"""Requests that change an engine's weights: the same to every engine, and nothing but a success counts."""

import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from atroposlib.errors import AtroposError
from atroposlib.example_trainer.config import TrainingConfig

_NOT_FOUND = 404


class WeightSyncError(AtroposError, RuntimeError):
    """An engine did not take the weights."""


class Engine:
    """One engine, by its address."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url
        self._client = client

    def post(self, path: str, body: dict[str, Any] | None = None, *, optional: bool = False) -> None:
        """WeightSyncError unless the engine answers 2xx and does not say `success: false`.

        Args:
            optional: the engine may lack the route.
        """
        reply = self._ask("POST", path, body)
        if optional and reply.status_code == _NOT_FOUND:
            return
        if not _is_success(reply):
            raise WeightSyncError(f"POST {self.url}{path} answered {reply.status_code}: {reply.text[:500]}")

    def did(self, path: str) -> bool:
        """Whether a POST to this path was a success."""
        with contextlib.suppress(WeightSyncError):
            return _is_success(self._ask("POST", path, None))
        return False

    def get(self, path: str) -> dict[str, Any]:
        """What the engine answers; WeightSyncError unless it is 200 with JSON."""
        try:
            return self._ask("GET", path, None).raise_for_status().json()
        except (httpx.HTTPStatusError, json.JSONDecodeError) as error:
            raise WeightSyncError(f"GET {self.url}{path} failed: {type(error).__name__} {error}") from error

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            return self._client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise WeightSyncError(f"{method} {self.url}{path} failed: {type(error).__name__} {error}") from error


class Engines:
    """All engines at once: none waits until another has finished its requests."""

    def __init__(self, config: TrainingConfig) -> None:
        self._client = httpx.Client(timeout=config.engine_timeout_s)
        self._engines = [Engine(url.rstrip("/").removesuffix("/v1"), self._client) for url in config.sync_urls]
        self._threads = ThreadPoolExecutor(max(1, len(self._engines)))

    def each(self, action: Callable[[Engine], object]) -> None:
        """Do something to every engine, and raise the first error once all are through."""
        tasks = [self._threads.submit(action, engine) for engine in self._engines]
        errors = [error for task in tasks if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    def post(self, path: str, body: dict[str, Any] | None = None, *, optional: bool = False) -> None:
        """`Engine.post` for every engine."""
        self.each(lambda engine: engine.post(path, body, optional=optional))

    def get(self, path: str) -> dict[str, dict[str, Any]]:
        """What each engine answers, by its URL."""
        return {engine.url: engine.get(path) for engine in self._engines}

    def close(self) -> None:
        """Let go of threads and connections."""
        self._threads.shutdown()
        self._client.close()


def _is_success(reply: httpx.Response) -> bool:
    if not reply.is_success:
        return False
    try:
        content = reply.json()
    except json.JSONDecodeError:
        return True
    return not (isinstance(content, dict) and content.get("success") is False)
