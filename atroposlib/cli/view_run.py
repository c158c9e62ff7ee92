"""`view-run`: browse rollouts of files, or of a running API, in a browser."""

import logging
import socket
import threading
from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from atroposlib.cli.boundary import App, run
from atroposlib.data.rollout_files import find_rollout_files
from atroposlib.data.table import table_of
from atroposlib.data.tokenizers import load_tokenizer
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.frontend.live_rollouts import LiveRollouts
from atroposlib.frontend.run_view import Decode, FileRollouts, Rollouts, make_app

logger = logging.getLogger(__name__)

app = App()

BATCH_GROUPS = 8


@app.command()
def view(
    rollouts: Annotated[
        list[str] | None, typer.Argument(help="Rollout files, folders (a run's too) or patterns; none: a running API.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0: a free one.")] = 9001,
    tokenizer: Annotated[str | None, typer.Option(help="Shows tokens as text; without one as ids.")] = None,
    api_url: Annotated[str, typer.Option(help="Live: the trajectory API.")] = "http://localhost:8000",
    group_size: Annotated[int, typer.Option(min=1, help="Live: responses per group.")] = 2,
    max_token_len: Annotated[int, typer.Option(min=1, help="Live: longest sequence registered.")] = 2048,
) -> None:
    """Browse rollouts: filter, groups side by side, tokens with mask and logprobs.

    The page is served on 127.0.0.1 only; reach another machine's through an SSH tunnel.

    \b
    Examples:
      view-run runs/main/
      view-run runs/main/ --tokenizer ./tokenizer --port 9100
      view-run --api-url http://localhost:8000 --group-size 8     (live)
    """
    source: Rollouts
    if rollouts:
        source = FileRollouts()
        files = find_rollout_files(rollouts)
        threading.Thread(target=_index, args=(source, files), name="index", daemon=True).start()
    else:
        source = LiveRollouts(api_url, batch_size=group_size * BATCH_GROUPS, max_token_len=max_token_len)
        source.start()
    listener = _listen(port)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server = uvicorn.Server(uvicorn.Config(make_app(source, _decoder(tokenizer)), log_level="warning"))
    server.run(sockets=[listener])


def _index(source: FileRollouts, files: list[Path]) -> None:
    """Make every file known to the view; a damaged one is named and left out."""
    for number, path in enumerate(files, 1):
        source.pending = f"indexing {path.name} ({number} of {len(files)})"
        try:
            table = table_of(path)
            table.set_aside.warn()
            source.add(table)
        except (AtroposError, OSError) as error:
            logger.warning("%s", error)
    source.pending = ""


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); give another --port") from error
    listener.listen()
    return listener


def _decoder(spec: str | None) -> Decode | None:
    """The text of each id, from a tokenizer that is loaded when the first group is shown."""
    if spec is None:
        return None
    loaded = []

    def decode(ids: list[int]) -> list[str]:
        if not loaded:
            loaded.append(load_tokenizer(spec))
        return loaded[0].batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)

    return decode


def main() -> None:
    """Console script."""
    run(app, "view-run")


if __name__ == "__main__":
    main()
