"""`run-api`: starts the trajectory API.

Exit codes: 0 stopped by a signal with everything on disk, 1 cannot start, 2 wrong usage.
"""

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer

from atroposlib.api import auth
from atroposlib.cli.boundary import command, listening, run
from atroposlib.errors import ConfigError
from atroposlib.paths import expand_path
from atroposlib.system_limits import raise_descriptor_limit

logger = logging.getLogger("atroposlib.api")

HELP = """Serve the trajectory API: environments post scored groups, trainers pull batches.

Examples:
  run-api
  run-api --port 8010 --state-dir runs/first/api
  run-api --host 0.0.0.0 --token-file ~/.atropos-token
"""


def default_state_dir(port: int) -> Path:
    """The user's folder for the server on this port: `$XDG_STATE_HOME/atroposlib/api-<port>`."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return expand_path(base, what="XDG_STATE_HOME") / "atroposlib" / f"api-{port}"


def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    state_dir: Annotated[
        str | None,
        typer.Option(help="Folder that keeps the run over restarts; default: $XDG_STATE_HOME/atroposlib/api-<port>."),
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Keep everything in memory; a restart forgets it.")] = False,
    token_file: Annotated[str | None, typer.Option(help=f"File with the token; else {auth.TOKEN_VARIABLE}.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without a token.")] = False,
    env_timeout_s: Annotated[
        float, typer.Option(min=1, help="Seconds of silence after which an environment stops counting.")
    ] = 300,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Largest request body, also after inflating.")] = 100,
    accept_older: Annotated[
        bool, typer.Option("--accept-older", help="Start although the folder is older than its last server left it.")
    ] = False,
    max_queue_mb: Annotated[
        float, typer.Option(min=0.001, help="Most that waiting groups may take; inf: what the disk holds.")
    ] = math.inf,
    reload: Annotated[bool, typer.Option("--reload", hidden=True)] = False,
) -> None:
    if reload:
        logger.warning("--reload of atroposlib 0.4.0 has no effect: after a change of the code start run-api again")
    token = auth.read_token(expand_path(token_file, what="--token-file") if token_file else None, os.environ)
    if token is None and not insecure and not auth.is_loopback(host):
        raise ConfigError(
            f"--host {host} is open to other machines, but there is no token; set {auth.TOKEN_VARIABLE} or "
            "--token-file, or say --insecure"
        )
    from atroposlib.api.server import create_app

    descriptors = raise_descriptor_limit()
    listener = listening(host, port)
    port = listener.getsockname()[1]
    folder = None if memory else expand_path(state_dir, what="--state-dir") if state_dir else default_state_dir(port)
    app = create_app(
        folder,
        accept_older=accept_older,
        token=token,
        env_timeout_s=env_timeout_s,
        max_body_mb=max_body_mb,
        max_queue_mb=max_queue_mb,
        check_host=token is None and not insecure,
    )
    for stop in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises the signal again once it has shut down
        signal.signal(stop, lambda *_: sys.exit(0))
    listener.listen(2048)
    print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    logger.info("state: %s", folder or "in memory")
    _run(app, listener, descriptors)


def _run(app, listener: socket.socket, descriptors: int) -> None:
    """Serve until SIGTERM or SIGINT; afterwards everything is on disk."""
    import uvicorn

    from atroposlib.api.protocol import MAX_STRANGERS, ConnectionProtocol

    app.state.strangers.max_strangers = min(MAX_STRANGERS, descriptors // 2)
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(ConnectionProtocol, app.state.strangers)),  # which is only called
        ws="none",
        access_log=False,
        log_config=None,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    gc.freeze()  # collections look at what came since, no longer at all that was imported
    uvicorn.Server(config).run(sockets=[listener])


app = command(serve, HELP)


def main() -> None:
    run(app, "run-api", log_level=logging.INFO)


if __name__ == "__main__":
    main()
