"""A managed server over HTTP: agents in any language talk OpenAI's protocol, and their tokens are tracked here.

    python -m atroposlib.envs.server_handling.managed_server_proxy --config servers.json

Records of rollouts are kept in `gateway_records/PORT.jsonl` of the working directory, unless `--records` names a file.

`servers.json`: `{"model_name": ..., "tokenizer_name": ..., "servers": [{"base_url": ..., "server_type": "sglang"}]}`.
An agent creates a session, uses `http://host:9100/<uuid>/v1` as its OpenAI base URL, and the environment fetches the
session's nodes: token ids, masks and log-probabilities of everything the model wrote.
"""

import argparse
import asyncio
import gc
import logging
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from atroposlib import calm_log
from atroposlib.api.auth import TOKEN_VARIABLE, is_loopback, read_token
from atroposlib.api.edge import invalid_request
from atroposlib.envs.server_handling.agents.dialect import CHAT, json_object
from atroposlib.envs.server_handling.agents.gateway import (
    BodyLimit,
    Gateway,
    close_connections,
    failure,
    timed_protocol,
)
from atroposlib.envs.server_handling.agents.record import CallLog
from atroposlib.envs.server_handling.agents.rollouts import Rollout, Rollouts, managed_for
from atroposlib.envs.server_handling.agents.settings import RolloutSettings
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.openai_server import HttpServer
from atroposlib.envs.server_handling.proxy_client import UnknownSessionError
from atroposlib.envs.server_handling.server_baseline import Server
from atroposlib.envs.server_handling.server_config import ServersConfig, load_config
from atroposlib.envs.server_handling.server_manager import ServerManager, count_lease, pick_server, server_at
from atroposlib.errors import AtroposError, ConfigError, RequestFault, RolloutFault
from atroposlib.paths import expand_path
from atroposlib.rollouts.run import RARE_COLLECTIONS
from atroposlib.type_definitions import JsonObject, Tokenizer

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9100
SESSION_TIMEOUT_S = 3600.0
RECORDS_FOLDER = "gateway_records"
GRACE_S = 30
"""Requests that run, or have come in half, get so long when the process is asked to end."""


class SessionCreateRequest(BaseModel):
    """Settings of a session: its server, and its ways to track."""

    tool_parser: str = "hermes"
    reasoning_parser: str | None = None
    track_tree: bool = False
    base_url: str | None = None


class Sessions:
    """All sessions: rollouts without a record on disk. One without a request for `timeout_s` is dropped.

    Expiry is looked at whenever sessions are used or counted, so no timer runs.
    """

    def __init__(self, timeout_s: float = SESSION_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._sessions: dict[str, Rollout] = {}

    def create(
        self,
        server: Server,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        tool_parser: str,
        track_tree: bool,
        reasoning_parser: str | None = None,
    ) -> Rollout:
        """Return a new session on `server`; ConfigError for an unknown tool parser."""
        self._expire()
        name = str(uuid.uuid4())
        managed = ManagedServer(
            server, tokenizer, track_tree=track_tree, tool_parser=tool_parser, reasoning_parser=reasoning_parser
        )
        settings = RolloutSettings.model_validate({"rollout_id": name, "tool_parser": tool_parser, "locked": False})
        self._sessions[name] = session = Rollout(settings, managed, key=name, session_model=model_name)
        count_lease(server, "train", 1)
        return session

    def find(self, session_uuid: str) -> Rollout:
        """Return a session, which is used now; UnknownSessionError when there is none of that id."""
        self._expire()
        if session_uuid not in self._sessions:
            raise UnknownSessionError(
                f"no session {session_uuid}; it was deleted or unused for {self.timeout_s:.0f} s: create another"
            )
        session = self._sessions[session_uuid]
        session.last_used = time.monotonic()
        return session

    def delete(self, session_uuid: str) -> None:
        """Forget a session; UnknownSessionError when there is none of that id."""
        self._forget(self.find(session_uuid))

    def all(self) -> list[Rollout]:
        self._expire()
        return list(self._sessions.values())

    def _expire(self) -> None:
        oldest = time.monotonic() - self.timeout_s
        for session in list(self._sessions.values()):
            if not session.is_busy and session.last_used < oldest:
                self._forget(session)

    def _forget(self, session: Rollout) -> None:
        session.managed.reset()
        count_lease(session.managed.server, "train", -1)
        del self._sessions[session.id]


def choose_server(servers: Sequence[Server], base_url: str | None) -> Server:
    """Return the server at `base_url`, else the one with most free slots; RequestFault where there is none."""
    if not servers:
        raise RequestFault("the proxy has no inference servers yet; POST them to /setup")
    try:
        return pick_server(servers, "train") if base_url is None else server_at(servers, base_url)
    except ConfigError as error:
        raise RequestFault(str(error)) from None


def create_app(
    server_manager: ServerManager,
    tokenizer: Tokenizer,
    model_name: str = "unknown",
    *,
    session_timeout_s: float = SESSION_TIMEOUT_S,
    token: str | None = None,
    log: CallLog | None = None,
) -> FastAPI:
    """Return the proxy application.

    Args:
        server_manager: whose `servers` generate; /setup replaces them.
        tokenizer: of the served model.
        model_name: in every reply.
        session_timeout_s: a session unused for so long is dropped, and a rollout sealed (its `idle_s` comes first).
        token: asked of every request that is none of an agent's to its model (Bearer, or Basic password); None asks
            for nothing.
        log: where the records of rollouts are kept.
    """
    proxy = _Proxy(server_manager, tokenizer, model_name, Sessions(session_timeout_s))
    proxy.rollouts = Rollouts(proxy.managed_server, log, idle_s=session_timeout_s)
    gateway = Gateway(
        proxy.rollouts,
        token=token,
        other=proxy.sessions.find,
        model=lambda: proxy.model_name,
    )
    schema = "/openapi.json" if token is None else None  # its routes ask for no token
    app = FastAPI(title="Managed server proxy", dependencies=[Depends(_access_check(gateway))], openapi_url=schema)
    routes: list[tuple[str, str, Callable[..., Awaitable[object]]]] = [
        ("GET", "/health", proxy.health),
        ("POST", "/setup", proxy.setup),
        ("GET", "/servers", proxy.servers),
        ("POST", "/sessions/create", proxy.create_session),
        ("GET", "/sessions", proxy.list_sessions),
        ("POST", "/{session_uuid}/v1/chat/completions/render", proxy.render),
        ("GET", "/{session_uuid}/nodes", proxy.nodes),
        ("POST", "/{session_uuid}/reset", proxy.reset),
        ("DELETE", "/{session_uuid}", proxy.delete_session),
    ]
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method])
    app.router.routes[:0] = [*gateway.model_routes(), *gateway.control_routes()]  # the first that matches is taken
    app.add_middleware(BodyLimit)
    for kind in (HTTPException, UnknownSessionError, RolloutFault, ConfigError, TemplateError, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)  # pyright: ignore[reportArgumentType]
    return app


class _Proxy:
    """Answers the routes."""

    def __init__(self, manager: ServerManager, tokenizer: Tokenizer, model_name: str, sessions: Sessions) -> None:
        self.manager = manager
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.sessions = sessions
        self.rollouts: Iterable[Rollout] = ()
        self._left: list[Server] = []  # replaced, and in use by those that were there before

    async def health(self) -> JsonObject:
        servers = self.manager.servers
        return {
            "status": "ok",
            "model": self.model_name,
            "sessions": len(self.sessions.all()),
            "servers": len(servers),
            "healthy_servers": sum(bool(server.server_healthy) for server in servers),
        }

    async def setup(self, config: ServersConfig) -> JsonObject:
        """Replace the servers; sessions and rollouts stay where they are, and the tokenizer follows the model.

        Servers that were replaced are closed once nobody uses them, as far as this or a later call finds.
        """
        servers = ServerManager(configs=config.server_configs()).servers
        if config.model_name != self.model_name:
            self.tokenizer, self.model_name = config.load_tokenizer(), config.model_name
        replaced, self.manager.servers = [*self._left, *self.manager.servers], servers
        users = [*self.sessions.all(), *(rollout for rollout in self.rollouts if not rollout.is_sealed)]
        self._left = [server for server in replaced if any(user.managed.server is server for user in users)]
        for server in replaced:
            if server not in self._left and isinstance(server, HttpServer):
                await server.close()
        return {"status": "ok", "servers": len(servers), "model_name": self.model_name}

    async def servers(self) -> JsonObject:
        return {
            "servers": [
                {
                    "index": index,
                    "base_url": _address(server),
                    "healthy": server.server_healthy,
                    "model_name": server.config.model_name,
                    "server_type": getattr(server.config, "server_type", "unknown"),
                }
                for index, server in enumerate(self.manager.servers)
            ]
        }

    async def create_session(self, request: SessionCreateRequest) -> JsonObject:
        session = self.sessions.create(
            choose_server(self.manager.servers, request.base_url),
            self.tokenizer,
            model_name=self.model_name,
            tool_parser=request.tool_parser,
            track_tree=request.track_tree,
            reasoning_parser=request.reasoning_parser,
        )
        return {
            "uuid": session.id,
            "model_name": session.model_name,
            "tool_parser": session.settings.tool_parser,
            "base_url": _address(session.managed.server),
            "created_at": session.created,
        }

    async def list_sessions(self) -> JsonObject:
        return {
            "sessions": [
                {
                    "uuid": session.id,
                    "model_name": session.model_name,
                    "base_url": _address(session.managed.server),
                    "created_at": session.created,
                    "last_accessed": time.time() - (time.monotonic() - session.last_used),
                    "num_nodes": len(session.managed.nodes()),
                }
                for session in self.sessions.all()
            ]
        }

    async def render(self, session_uuid: str, request: Request) -> JsonObject:
        """Return the prompt that a chat request would send."""
        body = json_object(await request.body())
        session = self.sessions.find(session_uuid)
        chat = CHAT.parse(body, session).chat
        assert chat is not None
        prompt = session.managed.prompt_of(chat)
        return {"prompt_text": prompt.text, "token_ids": prompt.ids, "num_tokens": len(prompt.ids)}

    def managed_server(self, settings: RolloutSettings) -> ManagedServer:
        return managed_for(choose_server(self.manager.servers, settings.base_url), self.tokenizer, settings)

    async def nodes(self, session_uuid: str) -> JsonObject:
        return {"nodes": [node.model_dump() for node in self.sessions.find(session_uuid).managed.nodes()]}

    async def reset(self, session_uuid: str) -> JsonObject:
        self.sessions.find(session_uuid).managed.reset()
        return {"status": "reset", "uuid": session_uuid}

    async def delete_session(self, session_uuid: str) -> JsonObject:
        self.sessions.delete(session_uuid)
        return {"status": "deleted", "uuid": session_uuid}


def _address(server: Server) -> str | None:
    """Return the base URL; None where a test has put a server with a config of its own."""
    return getattr(server.config, "base_url", None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Managed-server proxy: OpenAI's protocol with tracked tokens.")
    parser.add_argument("--config", required=True, help="JSON file: model_name, tokenizer_name, servers.")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="Port to listen on.")
    parser.add_argument("--host", default="127.0.0.1", help="Address; any but loopback needs a token.")
    parser.add_argument("--token-file", type=Path, help=f"File with the token; default: the variable {TOKEN_VARIABLE}.")
    parser.add_argument("--insecure", action="store_true", help="Listen on any address without a token.")
    parser.add_argument(
        "--session-timeout-s",
        type=float,
        default=SESSION_TIMEOUT_S,
        help="Seconds without a request after which "
        "a session is dropped and a rollout ends (which may name its own idle_s).",
    )
    parser.add_argument(
        "--records",
        metavar="FILE",
        help="File for the records of rollouts; what is in it is there again after a restart. Default: "
        f"{RECORDS_FOLDER}/PORT.jsonl in the working directory; empty: none, as with --no-records.",
    )
    parser.add_argument(
        "--no-records",
        dest="records",
        action="store_const",
        const="",
        help="Keep records in memory only, as for tests.",
    )
    args = parser.parse_args()
    calm_log.begin(logging.INFO)
    try:
        app = _app_from(args, read_token(args.token_file, os.environ))
    except AtroposError as error:
        raise SystemExit(f"{error}") from error

    with suppress(KeyboardInterrupt):
        server_of(app, host=args.host, port=args.port, log_level="info").run()


def server_of(app: ASGIApp, **options: Any) -> "uvicorn.Server":
    """The server of an application that has its process to itself: nothing of before is looked at by a collection.

    Its log has no line for each request, whose path may hold the key of a rollout.

    Args:
        options: of uvicorn's configuration.
    """
    import uvicorn

    gc.freeze()
    gc.set_threshold(*RARE_COLLECTIONS)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(GRACE_S, close_connections, self)
            await super().shutdown(sockets)

    return Server(uvicorn.Config(app, access_log=False, http=timed_protocol(), **options))


def _app_from(args: argparse.Namespace, token: str | None) -> FastAPI:
    if not (is_loopback(args.host) or token or args.insecure):
        raise ConfigError(
            f"--host {args.host} is reachable from other machines and no token is set; set {TOKEN_VARIABLE} or "
            "--token-file, or accept the risk with --insecure"
        )
    log = _log_of(args)
    config = load_config(args.config)
    manager = ServerManager(configs=config.server_configs())
    return create_app(
        manager,
        config.load_tokenizer(),
        config.model_name,
        session_timeout_s=args.session_timeout_s,
        token=token,
        log=log,
    )


def _log_of(args: argparse.Namespace) -> CallLog | None:
    """Open the file of the records that is asked for, and say which it is; None where there shall be none."""
    if args.records == "":
        logger.warning("records of rollouts are in memory only, and gone with this process: --no-records")
        return None
    folder = Path(RECORDS_FOLDER)  # of one user: a record has its rollout's keys
    try:
        if args.records is None:
            folder.mkdir(mode=0o700, exist_ok=True)
        path = expand_path(args.records or str(folder / f"{args.port}.jsonl"), what="--records").absolute()
        log = CallLog(path)
    except OSError as error:
        raise ConfigError(
            f"records of rollouts cannot be kept: {error}; name a file that can be written with --records FILE, or "
            "do without by --no-records"
        ) from error
    logger.info("records of rollouts: %s, %d bytes from before", path, path.stat().st_size)
    return log


def _access_check(gateway: Gateway) -> Callable[[Request], Awaitable[None]]:
    async def check(request: Request) -> None:
        if (refusal := gateway.refusal(request)) is not None:
            raise HTTPException(*refusal)

    return check


async def _answer_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    """Return the reply to a body that does not fit; FastAPI's own would repeat it, and cannot where it holds NaN."""
    return invalid_request(error)


async def _answer_error(_: Request, error: Exception) -> Response:
    """Return the reply to a request that failed, in OpenAI's form."""
    reply = failure(CHAT, error, is_session=True)
    if isinstance(error, HTTPException):
        reply.headers.update(error.headers or {})
    return reply


if __name__ == "__main__":
    main()
