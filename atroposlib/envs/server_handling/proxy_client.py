"""A session of the managed-server proxy, used like a `ManagedServer`.

The nodes are fetched after every generation, so `get_state()` is right at once.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import aiohttp
import orjson

from atroposlib.api.auth import read_token
from atroposlib.envs.server_handling.conversation import GivenMessages, copied
from atroposlib.envs.server_handling.sequence import SequenceNode, State, note_chats
from atroposlib.errors import EngineFault, KilledFault, RequestFault, RolloutFault
from atroposlib.type_definitions import JsonObject

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

logger = logging.getLogger(__name__)

GENERATION_TIMEOUT_S = 6 * 3600
"""A reply may hold tens of thousands of tokens; the proxy's own engine client has the tighter deadline."""

CONTROL_TIMEOUT_S = 30

UNKNOWN_SESSION = "unknown_session_error"
"""The type of the error that says a session is gone: the proxy was restarted, or the session deleted or unused."""


class UnknownSessionError(LookupError):
    """No session has this id: never created, deleted, or expired."""


class ProxyManagedServer:
    """One session on the proxy. Takes every keyword argument that `ManagedServer` takes."""

    def __init__(
        self, proxy_url: str, session_uuid: str, model_name: str = "unknown", base_url: str | None = None
    ) -> None:
        self.proxy_url = proxy_url.rstrip("/")
        self.session_uuid = session_uuid
        self.model_name = model_name
        self.base_url = base_url
        self._nodes: list[SequenceNode] = []
        self._talking = asyncio.Lock()
        self._reset_wanted = False

    def get_url(self) -> str:
        """Base URL for OpenAI clients of any language: what they generate is tracked in this session."""
        return f"{self.proxy_url}/{self.session_uuid}/v1"

    async def chat_completion(self, *, messages: GivenMessages, **kwargs: object) -> "ChatCompletion":
        """One chat request, tracked. `message.tool_calls` are dicts, as of `ManagedServer`.

        Raises:
            RequestFault: the proxy or its engine refused it.
            EngineFault: the engine failed, or the proxy could not be reached.
            KilledFault: the engine was told to abort it, or the session is gone, as after a restart of the proxy.
        """
        from openai.types.chat.chat_completion import ChatCompletion

        body = {**kwargs, "messages": [copied(message) for message in messages]}
        reply = await self._generate("chat/completions", body)
        completion = ChatCompletion.model_validate(reply)
        for choice, raw in zip(completion.choices, reply["choices"], strict=True):
            choice.message.tool_calls = raw["message"].get("tool_calls")
        return completion

    async def completion(self, **kwargs: object) -> "Completion":
        from openai.types.completion import Completion

        return Completion.model_validate(await self._generate("completions", kwargs))

    def get_state(self) -> State:
        """`{"nodes": [...]}` as of the last generation or `fetch_state`."""
        return {"nodes": list(self._nodes)}

    async def fetch_state(self) -> State:
        """Return the same, fetched now: what other clients of the session generated is in it."""
        async with self._talking:  # of two fetches the later one also answers later
            await self._pass_reset_on()
            reply = await self._call("GET", "nodes", timeout_s=CONTROL_TIMEOUT_S)
            self._nodes = [SequenceNode.model_validate(node) for node in reply["nodes"]]
            note_chats(self._nodes)
        return self.get_state()

    def reset(self) -> None:
        """Forget all sequences; the proxy is told before it is asked for anything else."""
        self._nodes = []
        self._reset_wanted = True

    async def cleanup(self) -> None:
        """Delete the session. A proxy that cannot be reached is only logged: sessions expire there."""
        try:
            await self._call("DELETE", "", timeout_s=CONTROL_TIMEOUT_S)
        except RolloutFault as error:
            logger.warning("proxy session not deleted: %s", error)

    async def __aenter__(self) -> "ProxyManagedServer":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Fetch the state, so that it can be read afterwards, and delete the session."""
        try:
            await self.fetch_state()
        finally:
            await self.cleanup()

    async def _generate(self, path: str, body: Mapping[str, object]) -> JsonObject:
        async with self._talking:
            await self._pass_reset_on()
        reply = await self._call("POST", f"v1/{path}", body=body, timeout_s=GENERATION_TIMEOUT_S)
        await self.fetch_state()
        return reply

    async def _pass_reset_on(self) -> None:
        """Once, and before a generation begins: the proxy would forget that one, too."""
        if self._reset_wanted:
            await self._call("POST", "reset", body={}, timeout_s=CONTROL_TIMEOUT_S)
            self._reset_wanted = False

    async def _call(self, method: str, path: str, *, timeout_s: float, body: object = None) -> JsonObject:
        url = f"{self.proxy_url}/{self.session_uuid}/{path}".rstrip("/")
        return await call_proxy(method, url, body=body, timeout_s=timeout_s)


async def create_proxy_session(
    proxy_url: str,
    base_url: str | None = None,
    tool_parser: str = "hermes",
    track_tree: bool = False,
    model_name: str = "unknown",
) -> ProxyManagedServer:
    """Return a new session on the proxy.

    Args:
        proxy_url: such as http://localhost:9100.
        base_url: generate on the server with this address; None: on the least used one.
        tool_parser: how tool calls are written.
        track_tree: keep every intermediate sequence.
        model_name: used when the proxy does not name its model.

    Raises:
        RequestFault: no such server or parser.
        EngineFault: the proxy could not be reached.
    """
    body = {"tool_parser": tool_parser, "track_tree": track_tree, "base_url": base_url}
    url = f"{proxy_url.rstrip('/')}/sessions/create"
    created = await call_proxy("POST", url, body=body, timeout_s=CONTROL_TIMEOUT_S)
    return ProxyManagedServer(
        proxy_url, created["uuid"], created.get("model_name") or model_name, created.get("base_url")
    )


async def call_proxy(method: str, url: str, *, body: object = None, timeout_s: float) -> JsonObject:
    """One request to the proxy; the JSON of its reply.

    Raises:
        KilledFault: the engine aborted it, or the session is gone; the item can be tried again.
        RequestFault: another 4xx.
        EngineFault: whatever else failed.
    """
    token = read_token(None, os.environ)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.request(method, url, json=body) as reply,
        ):
            if reply.ok:
                return orjson.loads(await reply.read())
            text = await reply.text()
            was_killed = any(f'"{kind}"' in text for kind in (f"{KilledFault.failure_class}_error", UNKNOWN_SESSION))
            fault = KilledFault if was_killed else RequestFault if 400 <= reply.status < 500 else EngineFault
            raise fault(f"{method} {url} answered {reply.status}: {text[:1000]}")
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        raise EngineFault(f"{method} {url} failed: {error or type(error).__name__}; is the proxy up?") from error
