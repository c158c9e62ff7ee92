"""`inference-node-wandb-watcher`: logs to wandb which inference servers of one node answer.

A node has 8 GPUs, so 8 // tp servers, on ports 9000 and up. Logged at each new training step, under the run's own
project and group: `server/server_health_<node>_<i>`, 1 or 0.
"""

import logging
import time
from collections.abc import Callable
from typing import Annotated

import httpx
import typer

from atroposlib.cli.boundary import command, http_url, run
from atroposlib.json_lines import object_in
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

GPUS_PER_NODE = 8
FIRST_PORT = 9000
POLL_S = 60.0
START_POLL_S = 1.0
ANSWER_TIMEOUT_S = 30.0


def watch(
    api_addr: Annotated[str, typer.Option("--api_addr", callback=http_url, help="Address of the trajectory API.")],
    tp: Annotated[int, typer.Option("--tp", min=1, max=GPUS_PER_NODE, help="GPUs per inference server.")],
    node_num: Annotated[int, typer.Option("--node_num", help="Number of this node, in run and metric names.")],
) -> None:
    """Watch the inference servers of this node until stopped, and log to wandb which of them answer.

    Example, on the second node of a job whose trajectory API runs on node7:
      inference-node-wandb-watcher --api_addr http://node7:8000 --tp 2 --node_num 1
    """
    import wandb

    with httpx.Client(timeout=ANSWER_TIMEOUT_S) as client:
        info = wait_for_run(client, api_addr)
        wandb.init(project=info["project"], group=info["group"], name=f"inf_node_{node_num}")
        step = 0
        while True:
            step = log_once(client, api_addr, tp, node_num, step, wandb.log)
            time.sleep(POLL_S)


def wait_for_run(client: httpx.Client, api_addr: str, pause: Callable[[float], object] = time.sleep) -> dict[str, str]:
    """The wandb project and group, as soon as a trainer has registered them."""
    while (info := _get(client, f"{api_addr}/wandb_info")).get("project") is None:  # one without a project says ""
        logger.info("waiting for a trainer: api=%s", api_addr)
        pause(START_POLL_S)
    return info


def log_once(
    client: httpx.Client, api_addr: str, tp: int, node_num: int, last_step: int, log: Callable[..., object]
) -> int:
    """Log the health of every server when the training step has grown; the step now.

    An API that does not answer changes nothing: it may be restarting.
    """
    step = _get(client, f"{api_addr}/status").get("current_step", last_step)
    if step > last_step:
        log(server_health(client, tp, node_num), step=step)
    return max(step, last_step)


def server_health(client: httpx.Client, tp: int, node_num: int) -> dict[str, int]:
    """1 for each server of this node that generates, 0 for the others."""
    return {
        f"server/server_health_{node_num}_{i}": int(_generates(client, FIRST_PORT + i))
        for i in range(GPUS_PER_NODE // tp)
    }


def _generates(client: httpx.Client, port: int) -> bool:
    try:
        return client.get(f"http://localhost:{port}/health_generate").status_code == 200
    except httpx.HTTPError:
        return False


def _get(client: httpx.Client, url: str) -> JsonObject:
    """The object that is answered; an empty one while there is no answer, or another server gives it."""
    try:
        return object_in(client.get(url).raise_for_status().content) or {}
    except httpx.HTTPError as error:
        logger.warning("no answer: url=%s error=%s", url, error)
        return {}


app = command(watch)


def main() -> None:
    run(app, "inference-node-wandb-watcher", log_level=logging.INFO)


if __name__ == "__main__":
    main()
