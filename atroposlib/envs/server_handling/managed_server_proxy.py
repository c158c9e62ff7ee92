"""A managed server over HTTP: agents in any language talk OpenAI's protocol, and their tokens are tracked here.

    python -m atroposlib.envs.server_handling.managed_server_proxy --config servers.json

`servers.json`: `{"model_name": ..., "tokenizer_name": ..., "servers": [{"base_url": ..., "server_type": "sglang"}]}`.
An agent creates a session, uses `http://host:9100/<uuid>/v1` as its OpenAI base URL, and the environment fetches the
session's nodes: token ids, masks and log-probabilities of everything the model wrote.
"""

import argparse
import logging
import os
import time
import uuid
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException

from atroposlib.api.auth import TOKEN_VARIABLE, is_authorized, is_loopback, read_token
from atroposlib.envs.server_handling.chat_prompt import render
from atroposlib.envs.server_handling.proxy_schemas import (
    UNKNOWN_SESSION,
    ChatCompletionProxyRequest,
    CompletionProxyRequest,
    RenderResponse,
    ServersConfig,
    SessionCreateRequest,
    SessionCreateResponse,
    load_config,
)
from atroposlib.envs.server_handling.proxy_sessions import (
    SESSION_TIMEOUT_S,
    Sessions,
    SessionState,
    UnknownSessionError,
    base_url_of,
    choose_server,
)
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import AtroposError, ConfigError, RequestFault, RolloutFault

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9100


def openai_error(status_code: int, message: str, error_type: str = "invalid_request_error") -> JSONResponse:
    """An error as OpenAI's clients read it."""
    return JSONResponse({"error": {"message": message, "type": error_type, "code": status_code}}, status_code)


def create_app(
    server_manager: ServerManager,
    tokenizer: Any,
    model_name: str = "unknown",
    *,
    session_timeout_s: float = SESSION_TIMEOUT_S,
    token: str | None = None,
) -> FastAPI:
    """The proxy application.

    Args:
        server_manager: whose `servers` generate; /setup replaces them.
        tokenizer: of the served model.
        model_name: in every reply.
        session_timeout_s: a session unused for so long is dropped.
        token: asked of every request (Bearer, or Basic password); None asks for nothing.
    """
    app = FastAPI(title="Managed server proxy", dependencies=[Depends(_token_check(token))] if token else [])
    proxy = _Proxy(server_manager, tokenizer, model_name, Sessions(session_timeout_s))
    routes: list[tuple[str, str, Any]] = [
        ("GET", "/health", proxy.health),
        ("GET", "/v1/models", proxy.models),
        ("POST", "/setup", proxy.setup),
        ("GET", "/servers", proxy.servers),
        ("POST", "/sessions/create", proxy.create_session),
        ("GET", "/sessions", proxy.list_sessions),
        ("POST", "/{session_uuid}/v1/chat/completions", proxy.chat_completions),
        ("POST", "/{session_uuid}/v1/chat/completions/render", proxy.render),
        ("POST", "/{session_uuid}/v1/completions", proxy.completions),
        ("GET", "/{session_uuid}/nodes", proxy.nodes),
        ("POST", "/{session_uuid}/reset", proxy.reset),
        ("DELETE", "/{session_uuid}", proxy.delete_session),
    ]
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method])
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(UnknownSessionError, _unknown_session)
    app.add_exception_handler(RolloutFault, _rollout_fault)
    app.add_exception_handler(ConfigError, _bad_request)
    app.add_exception_handler(TemplateError, _template_error)
    app.add_exception_handler(Exception, _server_error)
    return app


class _Proxy:
    """What the routes do."""

    def __init__(self, manager: ServerManager, tokenizer: Any, model_name: str, sessions: Sessions) -> None:
        self.manager = manager
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.sessions = sessions

    async def health(self) -> dict[str, Any]:
        servers = self.manager.servers
        return {
            "status": "ok",
            "model": self.model_name,
            "sessions": len(self.sessions.all()),
            "servers": len(servers),
            "healthy_servers": sum(bool(server.server_healthy) for server in servers),
        }

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self.model_name, "object": "model", "owned_by": "atropos"}]}

    async def setup(self, config: ServersConfig) -> dict[str, Any]:
        """Replace the servers; sessions that exist stay where they are. The tokenizer follows a new model."""
        servers = ServerManager(configs=config.server_configs()).servers
        if config.model_name != self.model_name:
            self.tokenizer, self.model_name = config.load_tokenizer(), config.model_name
        self.manager.servers = servers
        return {"status": "ok", "servers": len(servers), "model_name": self.model_name}

    async def servers(self) -> dict[str, Any]:
        return {
            "servers": [
                {
                    "index": index,
                    "base_url": base_url_of(server),
                    "healthy": server.server_healthy,
                    "model_name": server.config.model_name,
                    "server_type": getattr(server.config, "server_type", "unknown"),
                }
                for index, server in enumerate(self.manager.servers)
            ]
        }

    async def create_session(self, request: SessionCreateRequest) -> SessionCreateResponse:
        session = self.sessions.create(
            choose_server(self.manager.servers, request.base_url),
            self.tokenizer,
            model_name=self.model_name,
            tool_parser=request.tool_parser,
            track_tree=request.track_tree,
        )
        return SessionCreateResponse(
            uuid=session.uuid,
            model_name=session.model_name,
            tool_parser=session.tool_parser,
            base_url=session.base_url,
            created_at=session.created_at,
        )

    async def list_sessions(self) -> dict[str, Any]:
        return {
            "sessions": [
                {
                    "uuid": session.uuid,
                    "model_name": session.model_name,
                    "base_url": session.base_url,
                    "created_at": session.created_at,
                    "last_accessed": session.last_accessed,
                    "num_nodes": session.num_nodes(),
                }
                for session in self.sessions.all()
            ]
        }

    async def chat_completions(self, session_uuid: str, request: ChatCompletionProxyRequest) -> dict[str, Any]:
        with self.sessions.using(session_uuid) as session:
            _check_chat(request)
            reply = await session.managed_server.chat_completion(
                messages=request.messages, tools=request.tools, tool_choice=request.tool_choice, **request.sampling()
            )
            return _as_openai(reply, session, prefix="chatcmpl")

    async def completions(self, session_uuid: str, request: CompletionProxyRequest) -> dict[str, Any]:
        with self.sessions.using(session_uuid) as session:
            reply = await session.managed_server.completion(prompt=request.prompt, **request.sampling())
            return _as_openai(reply, session, prefix="cmpl")

    async def render(self, session_uuid: str, request: ChatCompletionProxyRequest) -> RenderResponse:
        with self.sessions.using(session_uuid) as session:
            _check_chat(request)
            messages = session.translator.convert_messages_for_template(request.messages)
            text = render(session.managed_server.tokenizer, messages, request.tools)
            ids = session.managed_server.tokenizer.encode(text, add_special_tokens=True)
            return RenderResponse(prompt_text=text, token_ids=ids, num_tokens=len(ids))

    async def nodes(self, session_uuid: str) -> dict[str, Any]:
        with self.sessions.using(session_uuid) as session:
            return {"nodes": [node.model_dump() for node in session.nodes()]}

    async def reset(self, session_uuid: str) -> dict[str, Any]:
        with self.sessions.using(session_uuid) as session:
            session.managed_server.reset()
            return {"status": "reset", "uuid": session_uuid}

    async def delete_session(self, session_uuid: str) -> dict[str, Any]:
        self.sessions.delete(session_uuid)
        return {"status": "deleted", "uuid": session_uuid}


def main() -> None:
    """Run the proxy."""
    parser = argparse.ArgumentParser(description="Managed-server proxy: OpenAI's protocol with tracked tokens.")
    parser.add_argument("--config", required=True, help="JSON file: model_name, tokenizer_name, servers.")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="Port to listen on.")
    parser.add_argument("--host", default="127.0.0.1", help="Address; any but loopback needs a token.")
    parser.add_argument("--token-file", type=Path, help=f"File with the token; default: the variable {TOKEN_VARIABLE}.")
    parser.add_argument("--insecure", action="store_true", help="Listen on any address without a token.")
    parser.add_argument(
        "--session-timeout-s", type=float, default=SESSION_TIMEOUT_S, help="Unused sessions are dropped after this."
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        app = _app_from(args, read_token(args.token_file, os.environ))
    except AtroposError as error:
        raise SystemExit(f"{error}") from error

    import uvicorn

    uvicorn.run(app, host=args.host, port=args.port, log_level="info")


def _app_from(args: argparse.Namespace, token: str | None) -> FastAPI:
    if not (is_loopback(args.host) or token or args.insecure):
        raise ConfigError(
            f"--host {args.host} is reachable from other machines and no token is set; set {TOKEN_VARIABLE} or "
            "--token-file, or accept the risk with --insecure"
        )
    config = load_config(args.config)
    manager = ServerManager(configs=config.server_configs())
    return create_app(
        manager,
        config.load_tokenizer(),
        config.model_name,
        session_timeout_s=args.session_timeout_s,
        token=token,
    )


def _check_chat(request: ChatCompletionProxyRequest) -> None:
    if not request.messages:
        raise RequestFault("messages must not be empty")
    for index, message in enumerate(request.messages):
        if not isinstance(message.get("role"), str):
            raise RequestFault(f"messages[{index}] has no role; give each message one, such as 'user'")
    if request.stream:
        raise RequestFault("stream=true is not supported: a tracked reply is complete; leave it out")


def _as_openai(reply: Any, session: SessionState, *, prefix: str) -> dict[str, Any]:
    return {
        **reply.model_dump(exclude_none=True, warnings=False),
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": session.model_name,
    }


def _token_check(token: str) -> Any:
    async def check(request: Request) -> None:
        if not is_authorized(request.headers.get("authorization"), token):
            raise HTTPException(401, "this proxy needs a token: send it as 'Authorization: Bearer TOKEN'")

    return check


async def _http_error(_: Request, error: Any) -> JSONResponse:
    return openai_error(error.status_code, str(error.detail))


async def _unknown_session(_: Request, error: Exception) -> JSONResponse:
    return openai_error(404, str(error), UNKNOWN_SESSION)


async def _rollout_fault(_: Request, error: Any) -> JSONResponse:
    if isinstance(error, RequestFault):
        return openai_error(400, str(error))
    return openai_error(500, str(error), f"{error.failure_class}_error")


async def _bad_request(_: Request, error: Exception) -> JSONResponse:
    return openai_error(400, str(error))


async def _template_error(_: Request, error: Exception) -> JSONResponse:
    return openai_error(400, f"the chat template refused the messages: {error}")


async def _server_error(_: Request, error: Exception) -> JSONResponse:
    return openai_error(500, f"{type(error).__name__}: {error}", "server_error")


if __name__ == "__main__":
    main()
