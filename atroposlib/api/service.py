"""The trajectory API without HTTP: what happens to a run, its groups and its batches.

Everything runs on one event loop. State in memory changes between awaits as a whole; the store applies changes in
the order they were made. The life of a group: checked -> stored -> queue (or buffer) -> batch -> trainer -> released.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from atroposlib.api.batching import EnvId, can_sum, env_status
from atroposlib.api.delivery import Connection
from atroposlib.api.metrics import Metrics
from atroposlib.api.payload import Payload, env_id_suffix
from atroposlib.api.queue import Batch, Group, TrajectoryQueue
from atroposlib.api.refusal import Refused
from atroposlib.api.retries import RetryFinder
from atroposlib.api.run import EnvRecord, Liveness, RunState
from atroposlib.api.schemas import RegisterEnv, Registration
from atroposlib.api.store import Change, GroupLost, NewGroup, Store
from atroposlib.api.waiting import waiting_for

logger = logging.getLogger(__name__)
KEPT_ACKS = 1000

StoringKey: TypeAlias = str | bytes
"""What a group being stored is known by: its id, else the digest of its content."""


@dataclass(frozen=True)
class Receipt:
    """What became of one group. `buffered`: sequences in its environment's buffer, None when it went to the queue."""

    buffered: int | None = None
    duplicate: bool = False


class TrajectoryService:
    """One run: registration, queue, batches."""

    def __init__(self, store: Store, *, env_timeout_s: float = 300.0) -> None:
        self.store = store
        self.metrics = Metrics()
        found = store.load()
        self.run = RunState() if found.run is None else RunState.from_json(found.run)
        self.liveness = Liveness(env_timeout_s, registered_before=len(self.run.envs))
        if found.step is not None:
            self.run.step = found.step
            self.run.formed += 1
        self.queue = TrajectoryQueue()
        for group in found.queued:
            self.queue.pool.put(group)
        for group in found.buffered:
            self._put_buffered(group)
        for batch in found.batches:
            self.queue.leased[batch.batch_id or ""] = batch
        self._next_number = found.next_number
        self._latest: Payload | None = None
        self._retries = RetryFinder(sorted(found.queued + found.buffered, key=lambda group: group.number))
        self._storing: dict[StoringKey, asyncio.Future[None]] = {}  # done when stored or failed
        self._offered = self._sizes_in_use()
        self.metrics.watch(self)

    # -- trainer ------------------------------------------------------------------------------------------------

    async def register(self, registration: Registration) -> int:
        """Take over a run's configuration; queue and environments stay. Returns the trainer's 128-bit number.

        Batches that were leased and not acknowledged come again, first: the trainer that held them is gone.
        """
        self._refuse_unfit(registration.batch_size)
        if self.run.registration is not None and self.run.batch_size != registration.batch_size:
            for batch in self.queue.returned:
                self.queue.dissolve(batch)
            self.queue.returned.clear()
        self.run.registration = registration
        self.run.step = registration.starting_step
        for batch in self.queue.expire_leases(math.inf):
            batch.counted = False
            self._give_back(batch)
        await self.store.change(Change(run=self.run.to_json()))
        logger.info("trainer registered: batch_size=%d step=%d", registration.batch_size, self.run.step)
        return secrets.randbits(128)

    async def next_batch(self, lease_s: float | None = None) -> Batch | None:
        """The earliest exact batch, or None while there is none. Refused before a trainer registered.

        The caller must report what became of it: `sent`, or `not_sent`. A leased batch stays here until `ack`.
        """
        if self.run.batch_size is None:
            raise Refused(409, "Trainer not registered. Call /register first.", "not_registered")
        if not self.run.started:
            self.run.started = True
            await self.store.change(Change(run=self.run.to_json()))
        batch = self._take_batch(self.run.batch_size)
        if batch is None:
            return None
        if not batch.counted:
            batch.counted = True
            self.run.step += 1
        if lease_s is not None:
            batch.batch_id = batch.batch_id or f"{batch.number}-{secrets.token_hex(4)}"
            batch.expires = time.time() + lease_s
            self.queue.leased[batch.batch_id] = batch
            await self.store.change(Change(run=self.run.to_json(), leased=[batch]))
        return batch

    async def contents(self, batch: Batch) -> list[bytes]:
        """The groups of a batch as JSON; GroupLost when one is damaged: it is dropped, ask for another batch."""
        try:
            stored = await self.store.read(batch.groups)
        except GroupLost as error:
            await self._drop_lost(batch, error)
            raise
        return [text + env_id_suffix(group.env_id) for text, group in zip(stored, batch.groups, strict=True)]

    async def sent(self, batch: Batch, started_at: float) -> None:
        """The response with this batch is in the hands of the network; without a lease that ends our duty."""
        if batch.expires is None:
            self.store.note_delivered(batch.groups, self.run.step)
        sequences = sum(group.sequences for group in batch.groups)
        self.metrics.batch_sent(batch.groups)
        logger.info(
            "batch sent: number=%d sequences=%d groups=%d step=%d queued=%d took_s=%.3f",
            batch.number,
            sequences,
            len(batch.groups),
            self.run.step,
            len(self.queue.pool),
            time.monotonic() - started_at,
        )
        if batch.expires is None:
            settled = [batch.number] if batch.batch_id else []
            await self.store.change(Change(run=self.run.to_json(), consumed=batch.groups, noted=True, settled=settled))

    async def not_sent(self, batch: Batch) -> None:
        """The response broke off: the batch goes back to the front and does not count."""
        logger.warning("batch not delivered, it goes back to the front: number=%d", batch.number)
        self.queue.leased.pop(batch.batch_id or "", None)
        self._uncount(batch)
        self._give_back(batch)

    def recall(self, batch: Batch) -> Coroutine[None, None, None]:
        """After `sent` it turned out that the connection broke: as `not_sent`. Not for leases, which have their end.

        From the call on no death of the process can lose the batch; await what it returns for the rest.
        """
        self._uncount(batch)
        self.store.note_restored(batch.groups, self.run.step)
        change = Change(run=self.run.to_json(), restored=batch.groups, noted=True)

        async def give_back() -> None:
            await self.store.change(change)
            await self.not_sent(batch)

        return give_back()

    async def ack(self, batch_id: str) -> None:
        """The trainer has the leased batch. May be repeated; Refused for an id that never was."""
        self._expire_leases()
        batch = self.queue.leased.pop(batch_id, None)
        if batch is None:
            batch = next((waiting for waiting in self.queue.returned if waiting.batch_id == batch_id), None)
            if batch is not None:
                self.queue.returned.remove(batch)
        if batch is None:
            if batch_id in self.run.acked:
                return
            raise Refused(404, f"batch_id is {batch_id[:80]!r}; expected one of this run's GET /batch?lease_s=...")
        self.run.acked = [*self.run.acked[-KEPT_ACKS:], batch_id]
        await self.store.change(Change(run=self.run.to_json(), consumed=batch.groups, settled=[batch.number]))
        self.store.release(batch.groups)

    # -- environments -------------------------------------------------------------------------------------------

    async def register_env(self, request: RegisterEnv) -> EnvRecord | None:
        """A new environment, or None while the trainer has not asked for its first batch."""
        if self.run.registration is None or not self.run.started:
            return None
        taken = sum(
            env.min_batch_allocation or 0.0
            for env in self.run.envs
            if env.connected and not self.liveness.is_silent(env.env_id)
        )
        if taken + (request.min_batch_allocation or 0.0) > 1.0 + 1e-9:
            raise Refused(
                422,
                f"min_batch_allocation is {request.min_batch_allocation}, but the other environments already hold "
                f"{taken:g} of every batch; all of them together may hold at most 1",
            )
        env = self.run.add_env(request)
        self.liveness.registered(env.env_id)
        self._offered.setdefault(env.env_id, set()).add(env.group_size)
        await self.store.change(Change(run=self.run.to_json()))
        logger.info(
            "environment registered: env_id=%d name=%s group_size=%d", env.env_id, env.real_name, env.group_size
        )
        return env

    async def disconnect_env(self, env_id: int) -> None:
        """The environment has ended; its minimum stops counting, its groups stay."""
        env = self.run.find_env(env_id)
        if env is None:
            raise self._unknown_env(env_id)
        env.connected = False
        await self.store.change(Change(run=self.run.to_json()))

    def env_status(self, env_id: int) -> dict[str, int | float]:
        """The six numbers an environment bases its back-pressure on."""
        me = self._speaking_env(env_id)
        envs = [env.share() for env in self.counting_envs()]
        status = env_status(me.share(), envs, self.queue.pool.classes, self.run.batch_size or 0)
        return {"current_step": self.run.step, **status}

    def counting_envs(self) -> list[EnvRecord]:
        """Environments that are connected, have spoken, and are not silent for too long."""
        return [env for env in self.run.envs if env.connected and self.liveness.counts(env.env_id)]

    async def add(
        self, payloads: Sequence[Payload], *, run_id: str | None, connection: Connection | None
    ) -> list[Receipt]:
        """Store groups, all or none; they are durable when this returns.

        Raises:
            Refused: one of them can never be delivered.
            StorageFull: no room now.
        """
        if run_id is not None and run_id != self.run.run_id:
            raise Refused(404, "these groups belong to a run that was reset; register again", "unknown_env")
        buffered = [self._goes_to_buffer(payload) for payload in payloads]
        receipts = [Receipt(duplicate=True)] * len(payloads)
        fresh: list[tuple[int, NewGroup]] = []
        for i, payload in enumerate(payloads):
            if not await self._is_stored(payload, [group for _, group in fresh], connection):
                fresh.append((i, self._number(payload, buffered[i])))
        for (i, _), receipt in zip(fresh, await self._store([group for _, group in fresh], connection), strict=True):
            receipts[i] = receipt
        if fresh:
            self._latest = payloads[fresh[-1][0]]
        return receipts

    # -- both ---------------------------------------------------------------------------------------------------

    async def reset(self) -> None:
        """Forget the run: queue, buffers, batches, environments, registration."""
        self.run = RunState()
        self.queue = TrajectoryQueue()
        self._latest = None
        self.liveness.forget_all()
        self._retries = RetryFinder([])
        self._offered = {}
        await self.store.reset(self.run.to_json())
        logger.info("run reset")

    async def latest_example(self) -> bytes | None:
        """The group that entered last, as JSON; None when there is none."""
        if self._latest is not None:
            return self._latest.json()
        newest = self.queue.pool.newest()
        return (await self.store.read([newest]))[0] + env_id_suffix(newest.env_id) if newest else None

    def waiting_for(self) -> str | None:
        """Why no batch is ready, in words; None when one is."""
        self._expire_leases()
        return waiting_for(self.run, self.queue, self._minimums(), self.liveness)

    # -- groups -------------------------------------------------------------------------------------------------

    def _goes_to_buffer(self, payload: Payload) -> bool:
        """Whether a group waits in its environment's buffer first; Refused when it could never be delivered."""
        env = None if payload.env_id is None else self._speaking_env(payload.env_id)
        if self.run.registration is None:
            return False
        size, batch_size = payload.sequences, self.run.registration.batch_size
        if payload.longest > self.run.registration.max_token_len:
            raise Refused(
                422,
                f"a sequence has {payload.longest} tokens, but the trainer's max_token_len is "
                f"{self.run.registration.max_token_len}; cut it or raise max_token_len in its /register call",
            )
        if size > batch_size:
            raise Refused(
                422,
                f"the group has {size} sequences, but the trainer's batch_size is {batch_size}; a group must fit in "
                "one batch. Lower group_size or raise batch_size in the trainer's /register call",
            )
        own = self._offered.setdefault(payload.env_id, set())
        own.add(size)
        if env is not None and size < env.group_size and can_sum(own, env.group_size, size):
            return True
        sizes = set().union(*self._offered.values())
        if can_sum(sizes, batch_size, size):
            return False
        raise Refused(
            422,
            f"the group has {size} sequences; with the group sizes in use ({_listed(sizes)}) no batch of exactly "
            f"{batch_size} can hold it. Send groups whose size divides {batch_size}",
        )

    async def _is_stored(self, payload: Payload, earlier: Sequence[NewGroup], connection: Connection | None) -> bool:
        """Whether this group was stored before, by its id or because it repeats a request whose answer got lost."""
        if payload.group_id is not None and any(group.group_id == payload.group_id for group in earlier):
            return True
        while (storing := self._storing.get(payload.group_id or payload.digest)) is not None:
            await asyncio.wait([storing])
        if payload.group_id is not None:
            return self.store.knows_group_id(payload.group_id)
        return self._retries.may_repeat(payload.digest, connection)

    def _number(self, payload: Payload, buffered: bool) -> NewGroup:
        number = self._next_number
        self._next_number += 1
        return NewGroup(
            number,
            payload.env_id,
            payload.sequences,
            payload.content,
            payload.length,
            payload.group_id,
            buffered,
            payload.digest,
        )

    async def _store(self, groups: Sequence[NewGroup], connection: Connection | None) -> list[Receipt]:
        """Write groups and put them where they wait."""
        if not groups:
            return []
        run_id, stored = self.run.run_id, asyncio.get_running_loop().create_future()
        keys: set[StoringKey] = {group.group_id or group.digest for group in groups}
        self._storing.update(dict.fromkeys(keys, stored))
        try:
            kept = await self.store.add(groups)
        finally:
            for key in keys:
                if self._storing.get(key) is stored:
                    del self._storing[key]
            stored.set_result(None)
        for group in kept:
            self._retries.remember(group, connection)
        if run_id != self.run.run_id:
            raise Refused(404, "the run was reset while this group was being stored; register again", "unknown_env")
        receipts: list[Receipt] = []
        for new, group in zip(groups, kept, strict=True):
            self.metrics.group_stored(group)
            if new.buffered:
                receipts.append(Receipt(buffered=await self._buffer(group)))
            else:
                self.queue.pool.put(group)
                receipts.append(Receipt())
        return receipts

    async def _buffer(self, group: Group) -> int:
        completed = self._put_buffered(group)
        if completed:
            await self.store.change(Change(completed=completed))
        return self.queue.buffered_sequences(group.env_id or 0)

    def _put_buffered(self, group: Group) -> list[int]:
        """Buffer a part group; numbers of the groups that moved to the queue."""
        env = None if group.env_id is None else self.run.find_env(group.env_id)
        if env is None:
            self.queue.pool.put(group)
            return [group.number]
        return [moved.number for moved in self.queue.buffer(group, env.group_size)]

    # -- batches ------------------------------------------------------------------------------------------------

    def _take_batch(self, batch_size: int) -> Batch | None:
        self._expire_leases()
        if self.queue.returned:
            batch = self.queue.returned.pop(0)
            batch.expires = None
            return batch
        groups = self.queue.pool.take(batch_size, self._minimums())
        if groups is None:
            return None
        self.run.formed += 1
        return Batch(self.run.formed, groups)

    def _expire_leases(self) -> None:
        for batch in self.queue.expire_leases(time.time()):
            logger.warning("lease ended without acknowledgement, delivered again: batch_id=%s", batch.batch_id)
            self._give_back(batch)

    def _give_back(self, batch: Batch) -> None:
        """To the front as it is; if it was formed for another batch size, its groups to where they stood."""
        if sum(group.sequences for group in batch.groups) == self.run.batch_size:
            self.queue.give_back(batch)
        else:
            self.queue.dissolve(batch)

    def _uncount(self, batch: Batch) -> None:
        if batch.counted and batch.expires is None:
            batch.counted = False
            self.run.step -= 1

    async def _drop_lost(self, batch: Batch, error: GroupLost) -> None:
        lost = error.group
        logger.error("%s; the group is dropped", error)
        self.queue.leased.pop(batch.batch_id or "", None)
        self.run.step -= batch.counted
        batch.groups = [group for group in batch.groups if group is not lost]
        self.queue.dissolve(batch)
        settled = [batch.number] if batch.batch_id else []
        await self.store.change(Change(run=self.run.to_json(), consumed=[lost], settled=settled))
        self.store.release([lost])

    def _minimums(self) -> dict[EnvId, int]:
        """Sequences that each counting environment must have in every batch."""
        shares = {
            env.env_id: int((self.run.batch_size or 0) * (env.min_batch_allocation or 0))
            for env in self.counting_envs()
        }
        return {env_id: least for env_id, least in shares.items() if least > 0}

    def _refuse_unfit(self, batch_size: int) -> None:
        """Refused when groups wait that no batch of this size can hold."""
        waiting = {size for _, size in self.queue.pool.classes}
        unfit = sorted(
            size for size in waiting if not can_sum(waiting | {e.group_size for e in self.run.envs}, batch_size, size)
        )
        if unfit:
            raise Refused(
                409,
                f"groups of {_listed(unfit)} sequences are queued, which no batch of exactly {batch_size} can hold; "
                "register with another batch_size, or drop them with GET /reset_data",
            )

    # -- environments' records ----------------------------------------------------------------------------------

    def _speaking_env(self, env_id: int) -> EnvRecord:
        """The environment that makes this request; Refused when unknown or disconnected."""
        env = self.run.find_env(env_id)
        if env is None:
            raise self._unknown_env(env_id)
        if not env.connected:
            raise Refused(
                409, f"environment {env_id} ({env.real_name}) has disconnected; register again", "unknown_env"
            )
        self.liveness.touch(env_id)
        return env

    def _unknown_env(self, env_id: int) -> Refused:
        known = f"0 to {len(self.run.envs) - 1}" if self.run.envs else "none so far"
        return Refused(
            404, f"env_id is {env_id}; expected a registered environment ({known}). Call /register-env", "unknown_env"
        )

    def _sizes_in_use(self) -> dict[EnvId, set[int]]:
        """Group sizes per environment: what it announced and what it has sent."""
        sizes: dict[EnvId, set[int]] = {env.env_id: {env.group_size} for env in self.run.envs}
        for env_id, size in self.queue.pool.classes:
            sizes.setdefault(env_id, set()).add(size)
        return sizes


def _listed(sizes: set[int] | list[int]) -> str:
    shown = [str(size) for size in sorted(sizes)[:8]]
    return ", ".join(shown) + (", ..." if len(sizes) > 8 else "")
