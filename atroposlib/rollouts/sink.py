"""Where finished groups go: the rollout files first, then the trajectory API.

A group counts once its line is in the file. It stays "unacknowledged" until the API has it, also over restarts, and
carries the same `group_id` every time it is sent, so that the API can store it once.
"""

import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from atroposlib.errors import ApiError, AtroposError, EnvironmentFault
from atroposlib.json_lines import as_json
from atroposlib.rollouts.early_stop import RunLimits
from atroposlib.rollouts.failures import Fruitless
from atroposlib.rollouts.files import RolloutFiles
from atroposlib.rollouts.groups import to_record
from atroposlib.rollouts.ledger import Totals, describe
from atroposlib.rollouts.pool import StorageError
from atroposlib.rollouts.source import Work
from atroposlib.system_limits import limit_reached
from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

T = TypeVar("T")

RESEND_GROUPS = 16
"""Groups per request when groups of an earlier process are sent again."""


class Sender(Protocol):
    """The part of `atroposlib.api.client.EnvClient` that takes groups."""

    async def submit(self, groups: Sequence[Mapping[str, Json]]) -> None:
        """Return when the API acknowledged the groups; retried inside. ApiError: they are refused for good."""
        ...


@dataclass(eq=False, kw_only=True)
class Sink:
    """Stores and sends the groups of one run, at most `total` of them."""

    env: str
    run: str
    files: RolloutFiles | None
    sender: Sender | None
    total: int | None
    accept_score: float
    accepted: int | None = None
    tokens: int | None = None
    fruitless: Fruitless = field(default_factory=Fruitless)
    may_store: Callable[[str], bool] = lambda item_key: True  # asked right before its groups are written
    _delivered: int = 0  # groups of this process that the API took
    _refused: int = 0  # and that it did not
    _last_refusal: ApiError | None = None

    def __post_init__(self) -> None:
        self.limits = RunLimits(self.total, self.accepted, self.tokens)
        self._run_id = self.files.run_id if self.files else os.urandom(4).hex()
        self.totals = self.files.ledger.totals if self.files else Totals()
        self._taken = self.totals.groups  # stored, or being stored

    def may_start(self, in_flight: int) -> bool:
        """Would one more rollout still find room if each in flight gives one group?"""
        return self.limits.may_start(self.totals, in_flight)

    @property
    def is_full(self) -> bool:
        """The asked number of groups or accepted responses is stored, or the tokens are spent."""
        return self.limits.is_reached(self.totals)

    @property
    def unsent(self) -> int:
        """Stored groups that the API did not acknowledge; those being sent now are among them."""
        return len(self.files.ledger.unacknowledged) if self.files else 0

    async def store(self, groups: Sequence[Mapping[str, Json]], work: Work, *, send: Sequence[bool]) -> int:
        """Store the groups of one item and send those for which `send` is true; how many were stored.

        StorageError when the file cannot be written, EnvironmentFault when the API refuses a group.
        """
        self.fruitless.end()
        work = _named(work)
        wanted = self._missing_parts(len(groups), work)
        records = [
            to_record(
                groups[part],
                work,
                env=self.env,
                run=self.run,
                group_id=f"{self.env}/{self.run}/{self._run_id}/{work.key}/{part}",
                part=part,
                parts=len(groups),
            )
            for part in wanted
        ]
        if not records or not self.may_store(work.key):
            return 0
        self._taken += len(records)
        try:
            is_written = await self._write(records)
        except Exception:
            self._taken -= len(records)  # another group may have their place
            raise
        if not is_written:
            return 0
        if self.files and not all(send[part] for part in wanted):
            self.files.acknowledge([r["group_id"] for part, r in zip(wanted, records, strict=True) if not send[part]])
        await self._send([record for part, record in zip(wanted, records, strict=True) if send[part]])
        return len(records)

    async def reject(self, work: Work, reason: str) -> None:
        """Note that the item is done without a usable group; StorageError: that cannot be noted."""
        self.fruitless.add(reason, asked_an_engine=work.trace.replies > 0)
        work = _named(work)
        if self.files:
            await self._stored(self.files.reject(work.key, work.trace.usage["completion_tokens"], work.backlog))

    async def resend(self) -> int:
        """Send what is stored and the API did not acknowledge; how many groups. Not while others are being sent."""
        if self.files is None or self.sender is None:
            return 0
        waiting = list(self.files.ledger.unacknowledged.values())
        for start in range(0, len(waiting), RESEND_GROUPS):
            records = [self.files.read_group(entry) for entry in waiting[start : start + RESEND_GROUPS]]
            for refusal in await self._refusals(records):
                logger.warning("stored group not sent: %s", refusal)
        return len(waiting)

    def require_delivery(self) -> None:
        """Raise AtroposError when the API took none of the groups that it was sent."""
        if self._refused and not self._delivered:
            sent = f"{self._refused} groups that it was sent"
            raise AtroposError(f"the trajectory API refused all {sent}: {self._last_refusal}")

    def _missing_parts(self, parts: int, work: Work) -> list[int]:
        if self.files and work.key in self.files.ledger.done:
            return []  # by an earlier try, which failed behind its storing
        present = self.files.ledger.parts.get(work.key, set()) if self.files else set()
        missing = [part for part in range(parts) if part not in present]
        return missing if self.total is None else missing[: max(0, self.total - self._taken)]

    async def _write(self, records: Sequence[JsonObject]) -> bool:
        """False: another member has taken the item over."""
        if self.files is None:
            for record in records:
                self.totals.add(describe(record, self.accept_score))
            return True
        return bool(await self._stored(self.files.append(records)))

    async def _stored(self, writing: Awaitable[T]) -> T:
        assert self.files is not None
        try:
            return await writing
        except OSError as error:
            why = limit_reached(error) or error.strerror or error
            raise StorageError(
                f"{self.files.files.folder} cannot be written: {why}; the run stops, and the same command continues "
                "when it can be"
            ) from error

    async def _send(self, records: Sequence[JsonObject]) -> None:
        if refusals := await self._refusals(records):
            raise EnvironmentFault(f"the trajectory API refuses a group: {refusals[0]}") from refusals[0]

    async def _refusals(self, records: Sequence[JsonObject]) -> list[ApiError]:
        """Send groups; why the API refuses some of them, which are not sent again."""
        if not records or self.sender is None:
            return []
        groups = [_for_api(record) for record in records]
        refusals: list[ApiError] = []
        try:
            try:
                await self.sender.submit(groups)
            except TypeError:  # tensors, numbers beyond 64 bits: as the rollout file has them
                await self.sender.submit(as_json(groups))
        except ApiError as error:
            if len(records) > 1:  # the one at fault must not take the others with it
                return [refusal for record in records for refusal in await self._refusals([record])]
            refusals.append(error)
            self._refused, self._last_refusal = self._refused + 1, error
        else:
            self._delivered += len(records)
        if self.files:
            self.files.acknowledge([group["group_id"] for group in groups])
        return refusals


def _named(work: Work) -> Work:
    """The work under a name of its own for every time that it stores: authors also send groups in mid-rollout."""
    stores, work.stores = work.stores, work.stores + 1
    return replace(work, key=f"{work.key}+{stores}") if stores else work


def _for_api(record: Mapping[str, Json]) -> JsonObject:
    """The record as a trainer can use it: the API passes `generation_params` on, but not `sampling` and `engine`.

    A trainer needs the temperature for its logits, the weight versions for the staleness of a batch, and the seconds
    that the group took for the split of its step.
    """
    engine = record.get("engine") or {}
    facts = {key: engine[key] for key in ("weight_version_start", "weight_version_end") if engine.get(key)}
    if engine and record.get("duration_s") is not None:
        facts["duration_s"] = record["duration_s"]
    params = {**(record.get("sampling") or {}), **facts, **(record.get("generation_params") or {})}
    return {key: value for key, value in record.items() if key != "unscored"} | {"generation_params": params or None}
