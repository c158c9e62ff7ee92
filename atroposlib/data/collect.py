"""Datasets live from a running trajectory API: register as its trainer, pull batches, keep them, convert.

Groups go to `<output>.collecting.jsonl` first and are acknowledged once they are on disk there, so a stopped or
killed collection resumes with the same command. When there are enough, they are converted like any rollout file and
the raw groups are kept next to the output as `<output>.rollouts.jsonl`.
"""

import asyncio
import logging
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from atroposlib.data.lazy_group import hash64
from atroposlib.data.report import ExportReport, finished_report, is_dataset
from atroposlib.data.rollout_files import expand_input, read_lines
from atroposlib.data.table import Table, concatenate, index_path, scan_after
from atroposlib.errors import ApiError, ConfigError, DiskError, PathError
from atroposlib.json_lines import one_line
from atroposlib.lock_files import HeldError, hold
from atroposlib.paths import expand_path
from atroposlib.type_definitions import JsonObject

if TYPE_CHECKING:
    from atroposlib.api.client import TrainerClient

logger = logging.getLogger(__name__)

LEASE_S = 300.0
_POLL_S = 1.0
_SAY_AFTER_S = 5.0
_SAY_EVERY_POLLS = 10
_IDLE_POLLS = 30  # without a batch, before looking whether the API was reset
_MANY_STEPS = 1_000_000  # an upper limit that environments only report; the target ends a collection


@dataclass(frozen=True)
class Collection:
    """A live collection: source, size and output."""

    api_url: str
    batch_size: int  # sequences per batch
    max_token_len: int
    target: int  # responses or pairs wanted
    name: str  # wandb group of the run: sft_gen or dpo_gen
    take_over: bool = False  # also where another trainer has registered


def is_live_call(rollouts: list[str], output: str | None, *, append: bool) -> bool:
    """True when a command line asks to collect live: one path that does not exist yet (or is appended to), no output.

    Raises:
        ConfigError: one path that is a dataset already, or several and no output.
    """
    if output is not None:
        return False
    path = expand_input(rollouts[0])
    if path == Path():
        return False  # the current folder, which has no name of its own
    if len(rollouts) != 1:
        raise ConfigError(f"give --output for the dataset made from {' '.join(rollouts)}")
    if append or _ledger(path).exists() or not (path.exists() or any(sign in path.name for sign in "*?[")):
        return True
    if is_dataset(path):
        raise ConfigError(
            f"{path} is a dataset that was made already: to make one again name its rollouts, to collect more into it "
            "from a running API give --append-to-previous"
        )
    return False


@contextmanager
def sole_collection(output: str | Path) -> Iterator[None]:
    """Keeps other processes from collecting to the same output meanwhile: one would cut off what another writes.

    Raises:
        PathError: one does already, or this disk knows no locks.
    """
    ledger = _ledger(expand_path(output, what="the output"))
    try:
        ledger.parent.mkdir(parents=True, exist_ok=True)
        descriptor = hold(ledger.with_name(ledger.name + ".lock"), mode=0o644)
    except HeldError as held:
        raise PathError(
            f"process {held.pid} collects to {output} already; wait for it, stop it, or give another output"
        ) from None
    except OSError as error:
        raise PathError(
            f"{ledger}.lock cannot be locked: {error.strerror}; give an output on a disk that knows locks"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def collect(output: Path, plan: Collection, have: Callable[[Table], int]) -> Path:
    """Pull batches until `have` of the collected table reaches the target; returns the file of raw groups.

    Args:
        output: the dataset's path; the groups are collected next to it.
        have: how many records the groups so far would give.

    To be called inside `sole_collection`.

    Raises:
        ApiError: the API belongs to another trainer, or refused.
    """
    ledger = _ledger(output)
    try:
        asyncio.run(_collect(ledger, plan, have))
    except KeyboardInterrupt:
        logger.warning("stopped; the groups so far are in %s, the same command resumes", ledger)
        raise
    return ledger


def finish_earlier(output: str | Path) -> ExportReport | None:
    """The report of a collection that was killed after its dataset was there; its groups are put away."""
    target = expand_path(output, what="--output")
    ledger = _ledger(target)
    report = finished_report(target, ledger) if ledger.exists() else None
    if report is not None:
        keep_groups(ledger, target)
    return report


def keep_groups(ledger: Path, output: Path) -> Path:
    """Rename the collected groups to a free `<output>.rollouts[_n].jsonl`."""
    names = (output.with_name(f"{output.name}.rollouts{f'_{n}' if n else ''}.jsonl") for n in count())
    index_path(ledger).unlink(missing_ok=True)
    return ledger.rename(next(name for name in names if not name.exists()))


async def _collect(ledger: Path, plan: Collection, have: Callable[[Table], int]) -> None:
    from atroposlib.api.client import TrainerClient

    kept = CollectedGroups(ledger)
    table = scan_after(ledger, None) if ledger.exists() else concatenate([])
    is_enough = _Sufficiency(plan.target, have)
    if is_enough(table, is_idle=True):
        return
    async with TrainerClient(plan.api_url) as client:
        async with _told_while_waiting(
            f"no trajectory API answers at {plan.api_url}: without --output this command collects live from one "
            f"(run-api). From rollouts that are on disk: --output FILE behind the run's folder"
        ):
            await _register(client, plan)
        idle = 0
        while True:
            batch = await client.batch(LEASE_S)
            if batch is None:
                if is_enough(table, is_idle=True):
                    return
                idle += 1
                if idle % _SAY_EVERY_POLLS == 0:
                    logger.warning("no batch for %d s: no environment has sent enough groups yet", idle * _POLL_S)
                if idle % _IDLE_POLLS == 0 and await _run_group(plan.api_url) is None:
                    await _register(client, plan)
                await asyncio.sleep(_POLL_S)
                continue
            idle = 0
            kept.add(batch.groups)
            if batch.batch_id:
                await client.ack(batch.batch_id)
            kept.note_acknowledged()
            table = scan_after(ledger, table)
            logger.info("collected: groups=%d responses=%d", len(table.groups), len(table.responses))
            if is_enough(table, is_idle=False):
                return


@asynccontextmanager
async def _told_while_waiting(sentence: str) -> AsyncIterator[None]:
    """Log the sentence while the body takes long, again and again."""

    async def say() -> None:
        while True:
            await asyncio.sleep(_SAY_AFTER_S)
            logger.warning("%s", sentence)

    saying = asyncio.create_task(say())
    try:
        yield
    finally:
        saying.cancel()


class CollectedGroups:
    """The groups collected so far, on disk; a group that is delivered again is not kept again.

    Only groups of a batch that was not acknowledged come again, perhaps in other batches with other ids (the API was
    restarted, another batch size registered). So they are known by their bytes, and each group on disk that may come
    again stands for one delivery: an environment may well send two groups that are equal. Each line says how much of
    the file was acknowledged before it; those of earlier versions do not, and may all come again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._acked_bytes = 0
        self._may_come_again: Counter[int] = Counter()  # hashes of groups
        if path.exists():
            self._read()

    def add(self, groups: list[dict]) -> None:
        """Write the groups that are not on disk and sync them.

        Raises:
            DiskError: the disk is full or gone.
        """
        lines = []
        for group in groups:
            data = one_line(orjson.dumps({key: value for key, value in group.items() if value is not None}))
            key = hash64(data)
            if self._may_come_again[key]:
                self._may_come_again[key] -= 1
            else:
                lines.append(data[:-1] + b',"acked_bytes":%d}\n' % self._acked_bytes)
        try:
            with self._path.open("ab") as stream:
                stream.write(b"".join(lines))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise DiskError(
                f"{self._path} cannot be written: {error.strerror}; the batch was not acknowledged"
            ) from error

    def note_acknowledged(self) -> None:
        """The groups added last will not come again."""
        if not self._may_come_again.total():
            self._acked_bytes = self._path.stat().st_size

    def _read(self) -> None:
        """Resume what an earlier collection left; a line cut short by a kill is removed."""
        last = None
        for line in read_lines(self._path):
            last = line if line.is_complete else last
        os.truncate(self._path, last.offset + last.size if last else 0)
        mark = _MARK.search(last.data) if last else None
        self._acked_bytes = int(mark[1]) if mark else 0
        for line in read_lines(self._path, start=self._acked_bytes):
            # as `add` does; earlier versions escaped nothing
            self._may_come_again[hash64(one_line(_MARK.sub(b"}", line.data).rstrip(b"\n")))] += 1


_MARK = re.compile(rb',"acked_bytes":(\d+)}\n$')


class _Sufficiency:
    """Decides if the groups so far give the target; a check takes time that grows with them, so it is made rarely."""

    def __init__(self, target: int, have: Callable[[Table], int]) -> None:
        self._target, self._have = target, have
        self._checked = 0  # responses

    def __call__(self, table: Table, *, is_idle: bool) -> bool:
        rows = len(table.responses)
        if rows < self._target or rows == self._checked or (rows < self._checked * 1.05 and not is_idle):
            return False
        self._checked = rows
        return self._have(table) >= self._target


async def _register(client: "TrainerClient", plan: Collection) -> None:
    """Register as the trainer; never resets the server, and leaves another trainer's run alone."""
    group = f"atropos_{plan.name}"
    owner = await _run_group(plan.api_url)
    if owner not in (None, group) and not plan.take_over:
        raise ApiError(
            f"the API at {plan.api_url} serves a trainer already (wandb group {owner!r}); collecting would take its "
            "batches away. Use another API, stop that trainer and restart the API, or add --take-over. What a datagen "
            "run has recorded is on disk: give its folder and --output"
        )
    await client.register(registration(plan.name, plan.batch_size, plan.max_token_len))


def registration(name: str, batch_size: int, max_token_len: int) -> JsonObject:
    """Return the registration of a trainer that only collects: it has no checkpoints, and no end."""
    return {
        "wandb_group": f"atropos_{name}",
        "wandb_project": name,
        "batch_size": batch_size,
        "max_token_len": max_token_len,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": _MANY_STEPS,
    }


async def _run_group(api_url: str) -> str | None:
    """wandb group of the trainer that registered last; None when there is none."""
    from atroposlib.api.client import EnvClient

    async with EnvClient(api_url) as client:
        return (await client.wandb_info())["group"]


def _ledger(output: Path) -> Path:
    return output.with_name(output.name + ".collecting.jsonl")
