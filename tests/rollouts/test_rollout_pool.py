import asyncio

from atroposlib.errors import EngineFault
from atroposlib.rollouts.failures import FailureLog, TaskHealth
from atroposlib.rollouts.pool import RolloutPool
from atroposlib.rollouts.source import Work, current_work


class EagerSource:
    """One item, which is handed out again the very moment it comes back."""

    def __init__(self) -> None:
        self.waiting = [Work(item={"n": 1}, key="1", task="t")]
        self.on_return = lambda: None

    @property
    def is_exhausted(self) -> bool:
        return not self.waiting

    async def next(self) -> Work | None:
        return self.waiting.pop() if self.waiting else None

    def put_back(self, work: Work) -> None:
        self.waiting.append(work)
        self.on_return()


async def test_a_try_that_starts_while_the_failed_one_is_still_ending_keeps_its_item():
    running_items: dict = {}
    items_seen = []

    async def roll_out(uuid: str) -> None:
        await asyncio.sleep(0)
        items_seen.append(running_items[uuid]["item"])
        if len(items_seen) == 1:
            raise EngineFault("503")

    source = EagerSource()
    failures, health = FailureLog(None, env="e", run="r"), TaskHealth(5, run_limit=30)
    pool = RolloutPool(
        source,  # pyright: ignore[reportArgumentType]
        roll_out,
        may_start=lambda _: True,
        failures=failures,
        health=health,
        tasks=set(),
        running_items=running_items,
    )
    source.on_return = lambda: pool._start(source.waiting.pop())
    pool.pace(1)
    await pool.run(lambda: pool.times.ended_ever == 1)
    assert items_seen == [{"n": 1}, {"n": 1}]
    assert running_items == {}
    assert failures.counts["environment"] == 0


class ManyItems:
    """As many items as are asked for."""

    is_exhausted = False

    def __init__(self) -> None:
        self.given = 0

    async def next(self) -> Work:
        self.given += 1
        return Work(item={"n": self.given}, key=str(self.given), task="t")


async def test_an_item_that_is_being_stored_does_not_keep_the_engine_from_the_next_one():
    source, generated, stored = ManyItems(), asyncio.Event(), asyncio.Event()
    storing = 0

    async def roll_out(uuid: str) -> None:
        nonlocal storing
        work = current_work.get()
        assert work is not None
        if work.key == "2":
            await generated.wait()  # a long answer
        work.rolled_out([])
        storing += 1
        await stored.wait()  # a slow disk

    pool = RolloutPool(
        source,  # pyright: ignore[reportArgumentType]
        roll_out,
        may_start=lambda in_flight: source.given < 8,
        failures=FailureLog(None, env="e", run="r"),
        health=TaskHealth(5, run_limit=30),
        tasks=set(),
        running_items={},
    )
    pool.pace(2)
    running = asyncio.create_task(pool.run(lambda: pool.times.ended_ever == 8))
    async with asyncio.timeout(60):
        while storing < 2:
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert source.given == 3  # the third took the place of the first; no more may wait for the disk
    generated.set()
    stored.set()
    async with asyncio.timeout(60):
        await running
    assert source.given == 8


async def test_a_cancellation_that_code_on_the_way_turns_into_an_error_is_no_failure():
    async def roll_out(uuid: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("tidying up failed") from None

    failures, health = FailureLog(None, env="e", run="r"), TaskHealth(5, run_limit=30)
    pool = RolloutPool(
        ManyItems(),  # pyright: ignore[reportArgumentType]
        roll_out,
        may_start=lambda _: True,
        failures=failures,
        health=health,
        tasks=set(),
        running_items={},
    )
    pool.pace(3)
    running = asyncio.create_task(pool.run(lambda: False))
    while pool.in_flight < 3:
        await asyncio.sleep(0)
    assert await pool.close(1.0) == 3
    await running
    assert not failures.counts
