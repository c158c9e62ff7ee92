"""`view-run`: browse rollouts of files, or of a running API, in a browser."""

import logging
import threading
import time
from typing import Annotated

import typer
import uvicorn

from atroposlib.cli.boundary import App, listening, run
from atroposlib.data.rollout_files import find_rollout_files
from atroposlib.errors import AtroposError
from atroposlib.frontend.group_detail import TokenTexts
from atroposlib.frontend.live_rollouts import LiveRollouts
from atroposlib.frontend.run_view import FileRollouts, RolloutSource, make_app

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 2.0
app = App()

BATCH_GROUPS = 8


@app.command()
def view(
    rollouts: Annotated[
        list[str] | None, typer.Argument(help="Rollout files, folders (a run's too) or patterns; none: a running API.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0: a free one.")] = 9001,
    tokenizer: Annotated[str | None, typer.Option(help="Of the model; without it that of the run.")] = None,
    api_url: Annotated[str, typer.Option(help="Live: the trajectory API.")] = "http://localhost:8000",
    group_size: Annotated[int, typer.Option(min=1, help="Live: responses per group.")] = 2,
    max_token_len: Annotated[int, typer.Option(min=1, help="Live: longest sequence registered.")] = 2048,
) -> None:
    """Browse rollouts: search, filter, compare runs; tokens with mask and log-probabilities; live while a run lasts.

    The page is served on 127.0.0.1 only; reach another machine's through an SSH tunnel. Press ? on it for the keys.

    Examples:
      view-run runs/main/
      view-run runs/a runs/b                                      (to compare)
      view-run runs/main/ --tokenizer ./tokenizer --port 9100
      view-run --api-url http://localhost:8000 --group-size 8     (live)
    """
    source: RolloutSource
    if rollouts:
        source = FileRollouts()
        source.pending = "looking at the files"
        find_rollout_files(rollouts)  # says what is wrong with the names before the page is up
        threading.Thread(target=_follow, args=(source, rollouts), name="index", daemon=True).start()
    else:
        source = LiveRollouts(api_url, batch_size=group_size * BATCH_GROUPS, max_token_len=max_token_len)
        source.start()
    listener = listening("127.0.0.1", port)
    listener.listen()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server = uvicorn.Server(uvicorn.Config(make_app(source, TokenTexts(tokenizer)), log_level="warning"))
    server.run(sockets=[listener])


def _follow(source: FileRollouts, rollouts: list[str]) -> None:
    """Make every file known to the view, and what a run adds to them."""
    while True:
        try:
            source.follow(find_rollout_files(rollouts, warns=False))
        except AtroposError as error:
            logger.warning("%s", error)
        time.sleep(_LOOK_AGAIN_S)


def main() -> None:
    run(app, "view-run")


if __name__ == "__main__":
    main()
