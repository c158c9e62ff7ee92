"""One engine as a process: take the port, load the model, announce, serve, end on a signal."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace

import uvicorn

from atroposlib.errors import ConfigError, LaunchError, ModelError
from atroposlib.paths import expand_path
from atroposlib_engine.engine import Engine
from atroposlib_engine.models import resolve_model
from atroposlib_engine.server import build_app

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServeOptions:
    """Options of `atropos engine`."""

    model: str
    host: str
    port: int
    slots: int
    context: int
    threads: int | None
    exit_with_parent: bool
    insecure: bool
    weights: str | None = None  # a .gguf file in place of the model's own
    weight_version: str = "default"


def serve(options: ServeOptions) -> None:
    """Serve until a signal.

    Raises:
        ConfigError: an address that others can reach, without `insecure`.
        LaunchError: the port is taken.
        ModelError: the model cannot be fetched or loaded, or the engine failed while serving.
    """
    if options.host not in _LOOPBACK and not options.insecure:
        raise ConfigError(
            f"--host is {options.host!r}, which others can reach, and the engine has no login; use 127.0.0.1, or add "
            "--insecure on a network you trust"
        )
    listener = _listen(options.host, options.port)
    with contextlib.closing(listener):
        model = resolve_model(options.model)
        if options.weights is not None:
            model = replace(model, gguf=expand_path(options.weights, what="--weights"))
        if options.context > model.context:
            raise ConfigError(f"--context is {options.context}; {model.name} was trained for {model.context} tokens")
        engine = Engine(
            model,
            slots=options.slots,
            context=options.context,
            threads=options.threads,
            weight_version=options.weight_version,
        )
        url = f"http://{options.host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            build_app(engine), log_level="warning", access_log=False, timeout_graceful_shutdown=5, lifespan="off"
        )
        server = _Server(config, engine, f"engine ready: {url} model={model.name} slots={engine.llama.slots} "
                         f"context={engine.llama.context}", exit_with_parent=options.exit_with_parent)  # fmt: skip
        server.run(sockets=[listener])
        engine.stop()
    if engine.fault is not None:
        raise ModelError(f"the engine stopped: {engine.fault}; start it again")


class _Server(uvicorn.Server):
    """Ends running sequences as aborted on a signal, so that their callers get what there is and the exit is quick."""

    def __init__(self, config: uvicorn.Config, engine: Engine, announcement: str, *, exit_with_parent: bool) -> None:
        super().__init__(config)
        self._engine = engine
        self._announcement = announcement
        self._exit_with_parent = exit_with_parent

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)

        def end_soon() -> None:
            loop.call_soon_threadsafe(self._end)

        self._engine.on_fault = end_soon
        self._engine.start()
        self._parent_watch = asyncio.create_task(self._watch_parent()) if self._exit_with_parent else None
        print(self._announcement, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again at the end; ours are handled in `startup`."""
        yield

    def _end(self) -> None:
        self._engine.call(lambda: self._engine.scheduler.abort(None))
        self.should_exit = True

    async def _watch_parent(self) -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            await asyncio.sleep(0.5)
        logger.warning("the process that started this engine has ended; ending too")
        self._end()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(f"port {port} on {host} is taken by another process; stop it or pass --port 0") from error
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener
