"""An environment of ours as a server for OpenEnv's clients: `atropos serve-env NAME`.

The wire is that of OpenEnv 0.10: an episode is a WebSocket session at /ws with messages `reset`, `step`, `state` and
`close`. Over plain HTTP, where a server keeps nothing between two requests, an episode can be begun but not answered.
"""

import asyncio
import importlib.util
import json
import logging
import socket
import tempfile
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from atroposlib.api.auth import is_cross_site, is_loopback
from atroposlib.cli.boundary import App, run
from atroposlib.environments.adapters.external import ExternalEpisode, Turn, made
from atroposlib.environments.multi_turn import MultiTurnEnv
from atroposlib.environments.single_turn import SingleTurnEnv
from atroposlib.envs.server_handling.agents.gateway import BodyLimit
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class Reset(BaseModel):
    """Which episode begins."""

    seed: int | None = Field(None, ge=0, description="Number of the item; null: the next one.")
    split: Literal["train", "test"] = Field("train", description="Which items are numbered.")
    episode_id: str | None = Field(None, max_length=255, description="Name of the episode; null: a new one.")


class Said(BaseModel):
    """An action: the model's reply."""

    model_config = ConfigDict(extra="forbid")

    text: str
    metadata: JsonObject = {}


class SaidWithCalls(Said):
    """An action where there are tools; calls may stand in the text, too."""

    tool_calls: list[JsonObject] = []


class Seen(BaseModel):
    """An observation."""

    messages: list[JsonObject] = Field([], description="New turns of the conversation, in OpenAI's chat form.")
    tools: list[JsonObject] = Field([], description="What may be called, in OpenAI's chat form.")


class State(BaseModel):
    """Where an episode is. The item is no part of it: it holds the answer."""

    episode_id: str | None = None
    step_count: int = 0


class Session:
    """One client and its episode."""

    def __init__(self, server: "OpenEnvServer") -> None:
        self.server, self.state = server, State()
        self.episode: ExternalEpisode | None = None

    async def answer(self, message: JsonObject) -> JsonObject:
        """Return the answer to a message; ValidationError and whatever the environment raises."""
        kind, data = message.get("type"), message.get("data") or {}
        if kind == "reset":
            await self.close()
            asked = Reset.model_validate(data)
            item = await self.server.item(asked)
            self.episode = ExternalEpisode(self.server.env, item)
            self.state = State(episode_id=asked.episode_id or uuid.uuid4().hex)
            return await self._observed(self.episode.begin())
        if kind == "step":
            said = self.server.action.model_validate(data)
            if self.episode is None:
                raise ConfigError("no episode runs here; send a reset")
            self.state.step_count += 1
            return await self._observed(self.episode.reply(said.text, getattr(said, "tool_calls", ())))
        if kind == "state":
            return {"type": "state", "data": self.state.model_dump()}
        return failed("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def _observed(self, awaited: Any) -> JsonObject:
        try:
            turn: Turn = await awaited
        except BaseException:
            await self.close()
            raise
        if turn.is_over:
            await self.close()
        seen = Seen(messages=turn.messages, tools=turn.tools).model_dump()
        reward = turn.reward if self.state.step_count else None
        return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": turn.is_over}}

    async def close(self) -> None:
        """End the episode."""
        episode, self.episode = self.episode, None
        if episode is not None:
            await episode.close()


class OpenEnvServer:
    """The routes.

    Args:
        env: set up.
        sessions: at the same time; one more is told CAPACITY_REACHED.
        idle_s: a session from which nothing came for so long is closed.
    """

    def __init__(self, env: SingleTurnEnv | MultiTurnEnv, *, sessions: int = 64, idle_s: float = 3600.0) -> None:
        self.env, self.sessions, self.idle_s = env, sessions, idle_s
        self.action = SaidWithCalls if isinstance(env, MultiTurnEnv) and env.uses_tools else Said
        self._active = self._given = 0
        routes = [
            WebSocketRoute("/ws", self._session),
            Route("/health", self._health),
            Route("/metadata", self._metadata),
            Route("/schema", self._schema),
            Route("/state", self._state),
            Route("/reset", self._reset, methods=["POST"]),
            Route("/step", self._step, methods=["POST"]),
        ]
        self.app = BodyLimit(Starlette(routes=routes))

    async def item(self, asked: Reset) -> Any:
        """Return the item that a reset asks for."""
        number = asked.seed
        if number is None:
            number, self._given = self._given, self._given + 1
        item = await self.env.problem(asked.split, number)
        if item is None:
            raise ConfigError(f"there is no item number {number} in {asked.split}; give a smaller seed")
        return item

    async def _session(self, websocket: WebSocket) -> None:
        if is_cross_site(websocket.headers):
            await websocket.close(1008, "requests from web pages of other sites are refused")
            return
        await websocket.accept()
        if self._active >= self.sessions:
            counts = {"active_sessions": self._active, "max_sessions": self.sessions}
            said = f"all {self.sessions} sessions are in use; try again later, or raise --sessions"
            await websocket.send_json(failed("CAPACITY_REACHED", said, **counts))
            await websocket.close()
            return
        self._active += 1
        session = Session(self)
        try:
            while (answer := await self._answer(session, websocket)) is not None:
                await websocket.send_json(answer)
            await websocket.close()
        except TimeoutError:
            await websocket.close(1001, f"nothing came for {self.idle_s:.0f} s")
        except WebSocketDisconnect:
            pass
        finally:
            self._active -= 1
            await session.close()

    async def _answer(self, session: Session, websocket: WebSocket) -> JsonObject | None:
        async with asyncio.timeout(self.idle_s):
            text = await websocket.receive_text()
        try:
            message = json.loads(text)
        except ValueError as error:
            return failed("INVALID_JSON", f"Invalid JSON: {error}")
        if not isinstance(message, dict) or not isinstance(message.get("data") or {}, dict):
            return failed("VALIDATION_ERROR", "Invalid message", errors=[])
        if message.get("type") == "close":
            return None
        try:
            return await session.answer(message)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            return failed("VALIDATION_ERROR", "Invalid message", errors=errors)
        except Exception as error:
            logger.warning("an episode failed: error=%s: %s", type(error).__name__, error)
            return failed("EXECUTION_ERROR", f"{type(error).__name__}: {error}")

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "healthy"})

    async def _metadata(self, request: Request) -> JSONResponse:
        said = (type(self.env).__doc__ or "").strip()
        return JSONResponse({"name": self.env.label, "description": said, "version": None, "author": None})

    async def _schema(self, request: Request) -> JSONResponse:
        schemas = {"action": self.action, "observation": Seen, "state": State}
        return JSONResponse({name: model.model_json_schema() for name, model in schemas.items()})

    async def _state(self, request: Request) -> JSONResponse:
        return JSONResponse(State().model_dump())

    async def _reset(self, request: Request) -> JSONResponse:
        session = Session(self)
        try:
            data = json.loads(await request.body() or b"{}")
            return JSONResponse((await session.answer({"type": "reset", "data": data}))["data"])
        except ValueError as error:
            return JSONResponse({"detail": str(error)}, 422)
        except AtroposError as error:
            return JSONResponse({"detail": str(error)}, 500)
        finally:
            await session.close()

    async def _step(self, request: Request) -> JSONResponse:
        said = "no episode is kept between two HTTP requests; open a session at /ws, as OpenEnv's clients do"
        return JSONResponse({"detail": said}, 409)


def failed(code: str, message: str, **more: Any) -> JsonObject:
    """Return an error as OpenEnv's servers send it."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}


app = App()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve_env(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `atropos env list` shows it, or a .py file.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    sessions: Annotated[int, typer.Option(min=1, help="Episodes at the same time.")] = 64,
    idle_s: Annotated[float, typer.Option(min=0.1, help="Seconds after which a silent session is closed.")] = 3600.0,
    insecure: Annotated[bool, typer.Option(help="Allow an address other than loopback; there is no login.")] = False,
) -> None:
    """Serve an environment to OpenEnv's clients until SIGTERM or Ctrl-C. Prints its address when it is ready.

    Flags of the environment may follow, such as `--env.dataset my.jsonl`.

    Example:
      atropos serve-env countdown --port 8000 --env.levels '[2]'
    """
    if not (is_loopback(host) or insecure):
        raise ConfigError(f"--host {host} is reachable from other machines and there is no login; say --insecure")
    if not (importlib.util.find_spec("websockets") or importlib.util.find_spec("wsproto")):
        raise ConfigError("OpenEnv's clients speak WebSocket, which needs a package: pip install 'atroposlib[openenv]'")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_served(made(name, context.args, Path(folder)), name, host, port, sessions, idle_s))


async def _served(
    env: SingleTurnEnv | MultiTurnEnv, name: str, host: str, port: int, sessions: int, idle_s: float
) -> None:
    import uvicorn

    await env.setup()
    try:
        server = OpenEnvServer(env, sessions=sessions, idle_s=idle_s)
        config = uvicorn.Config(
            server.app,
            lifespan="off",
            log_level="warning",
            access_log=False,
            ws_max_size=MAX_MESSAGE_BYTES,
            timeout_graceful_shutdown=5,
        )
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            shown = f"[{host}]" if ":" in host else host
            print(f"{name}: http://{shown}:{listener.getsockname()[1]}", flush=True)
            await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        await env.teardown()


def main() -> None:
    run(app, "atropos serve-env", log_level=logging.INFO)


if __name__ == "__main__":
    main()
