"""`atropos-fake-trainer`: takes batches from the trajectory API and throws them away.

It stands where a trainer would, so that environments can be run only for their rollout files. Batches are leased
and acknowledged, so one lost on the way comes again; memory holds at most one batch.
"""

import asyncio
import logging
import signal
import sys
import time
from typing import Annotated

import typer

from atroposlib.api.client import TrainerClient
from atroposlib.cli.boundary import command, http_url, run

logger = logging.getLogger(__name__)

HELP = """Register at the trajectory API, pull batches and discard them, until SIGTERM, Ctrl-C or --num-steps.

Waits for the API when it is not up yet and continues by itself when it was restarted.

Examples:

  atropos-fake-trainer --batch-size 128

  atropos-fake-trainer --api-url http://:secret@node7:8000 --batch-size 256 --num-steps 100
"""

_LEASE_S = 600.0
_POLL_S = 0.25
_LOG_EVERY_S = 10.0
_FIRST_WORD_S, _SAY_AGAIN_S = 8.0, 60.0


class FakeTrainer:
    """A trainer whose training step is nothing.

    Args:
        batch_size: sequences per batch.
        num_steps: stop after this many batches of the run, earlier starts included; None: never.
    """

    def __init__(self, client: TrainerClient, *, batch_size: int, max_token_len: int, num_steps: int | None) -> None:
        self._client = client
        self._batch_size = batch_size
        self._max_token_len = max_token_len
        self._num_steps = num_steps
        self.steps = 0
        self.sequences = 0

    async def run(self) -> None:
        """Pull until `num_steps`; cancel it to stop.

        Raises:
            ApiError: the API refuses the registration.
        """
        self.steps = await self._register()
        next_line, last_batch, say_idle_at = 0.0, time.monotonic(), _FIRST_WORD_S
        while self._num_steps is None or self.steps < self._num_steps:
            batch = await self._client.batch(lease_s=_LEASE_S)
            now = time.monotonic()
            if batch is None:
                if (await self._client.info())["batch_size"] != self._batch_size:
                    await self._register()  # the API was reset
                if now - last_batch >= say_idle_at:
                    say_idle_at = now - last_batch + _SAY_AGAIN_S
                    await self._say_idle(now - last_batch)
                await asyncio.sleep(_POLL_S)
                continue
            if batch.batch_id is not None:
                await self._client.ack(batch.batch_id)
            last_batch, say_idle_at = now, _FIRST_WORD_S
            self.steps += 1
            self.sequences += batch.sequences
            if now >= next_line:
                next_line = now + _LOG_EVERY_S
                logger.info("batches discarded: steps=%d sequences=%d", self.steps, self.sequences)

    async def _register(self) -> int:
        """Announce the run; the step it stands at."""
        step = (await self._client.status())["current_step"]
        await self._client.register(
            {
                "wandb_group": "",
                "wandb_project": "",
                "batch_size": self._batch_size,
                "max_token_len": self._max_token_len,
                "checkpoint_dir": "",
                "save_checkpoint_interval": -1,
                "starting_step": step,
                "num_steps": self._num_steps or sys.maxsize,
            }
        )
        logger.info("registered: url=%s batch_size=%d step=%d", self._client.url, self._batch_size, step)
        return step

    async def _say_idle(self, idle_s: float) -> None:
        """Say what the API waits for."""
        status = await self._client.status()
        missing = status.get("waiting_for") or f"more than the {status.get('queue_size')} groups that it has"
        logger.warning("no batch for %.0f s: %s waits for %s", idle_s, self._client.url, missing)


def fake_trainer(
    api_url: Annotated[
        str, typer.Option(callback=http_url, help="The trajectory API; a token goes in as http://:TOKEN@host:port.")
    ] = "http://localhost:8000",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per batch; a multiple of the group size.")] = 64,
    max_token_len: Annotated[int, typer.Option(min=1, help="Longest sequence environments may send.")] = 1_000_000,
    num_steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many batches; default: never.")] = None,
) -> None:
    asyncio.run(_until_stopped(api_url, batch_size, max_token_len, num_steps))


async def _until_stopped(api_url: str, batch_size: int, max_token_len: int, num_steps: int | None) -> None:
    """Run the trainer; SIGTERM and Ctrl-C end it in order."""
    async with TrainerClient(api_url) as client:
        trainer = FakeTrainer(client, batch_size=batch_size, max_token_len=max_token_len, num_steps=num_steps)
        task = asyncio.create_task(trainer.run())
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sign, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            logger.info("stopping")
        logger.info("discarded: steps=%d sequences=%d", trainer.steps, trainer.sequences)


app = command(fake_trainer, HELP)


def main() -> None:
    run(app, "atropos-fake-trainer", log_level=logging.INFO)


if __name__ == "__main__":
    main()
