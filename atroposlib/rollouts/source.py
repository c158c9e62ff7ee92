"""Where items come from: failed engines' items first, then the environment's backlog, then its own items.

Every item has a key that is the same after a restart: its index in decimal when the environment has `get_item`, else
a hash of its content and how often that content came before. Items whose key is done are skipped.
"""

import asyncio
import hashlib
import inspect
import os
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Container, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import TypeAlias, TypeVar

from atroposlib.errors import EnvironmentFault
from atroposlib.json_lines import as_json, to_json
from atroposlib.rollouts.trace import RolloutTrace
from atroposlib.type_definitions import Item

T = TypeVar("T")


_PROCESS, _numbers = os.urandom(8).hex(), count()  # a system call for each name would be dear


@dataclass(slots=True, eq=False)
class Work:
    """An item to roll out: made by the source, carried through the pool, named in every line it becomes.

    Nothing that it holds may reach its task, whose context holds the work: such a cycle costs 3% in the collector.
    """

    item: Item
    key: str  # unique in a run, the same after a restart
    task: str
    uuid: str = field(default_factory=lambda: f"{_PROCESS}{next(_numbers):016x}")
    tries: int = 0  # failed tries so far
    started_at: float = field(default_factory=time.time)  # seconds since the epoch, of the current try
    began_s: float = field(default_factory=time.monotonic)  # the same by the clock that nobody sets
    waited_s: float = 0.0  # of that try, spent waiting for an engine that was down
    rollout_s: float = 0.0  # of that try, until it was rolled out
    is_rolled_out: bool = False  # generated and scored; what is left is checking and storing
    is_settled: bool = False  # nothing more comes of it, whatever its code still does
    stores: int = 0  # times that this try has stored or rejected groups; more than one where authors send their own
    asked: Counter[bytes] = field(default_factory=Counter)  # responses of this try by what was asked, see `OneByOne`
    trace: RolloutTrace = field(default_factory=RolloutTrace)
    backlog: list[Item] = field(default_factory=list)  # items this rollout asked for
    on_rolled_out: Callable[[], None] = lambda: None

    def rolled_out(self, backlog: Sequence[Item]) -> None:
        """The engine is not needed any more; its place is free for another item."""
        self.backlog, self.is_rolled_out = list(backlog), True
        self.rollout_s = self.took_s
        self.on_rolled_out()

    @property
    def took_s(self) -> float:
        """Seconds since the current try began."""
        return time.monotonic() - self.began_s


current_work: ContextVar[Work | None] = ContextVar("current_work", default=None)
"""The work of the running rollout; None outside of one."""


MAX_SET_ASIDE_IN_A_ROW = 1000
"""Items of set-aside tasks drawn one after the other before the source counts as exhausted."""


Draw: TypeAlias = Callable[[], Awaitable[tuple[str, Item] | None]]
"""Gives key and item of an environment's next item; None: nothing now."""


@dataclass(eq=False)
class ItemSource:
    """Gives the pool one piece of work after the other. Only the pool's filler calls `next`, one call at a time."""

    draw: Draw
    _: KW_ONLY
    is_done: Callable[[str], bool]  # by key; such items are skipped
    task_of: Callable[[Item], str]
    is_set_aside: Callable[[str], bool]  # by task; items of such tasks are skipped
    backlog: Callable[[], list[Item]]  # items to roll out before drawing new ones; emptied from the front
    ends: bool  # a None of `draw` means that there will be no more items
    lost: Callable[[str], None] = lambda key: None  # told the key of an item whose task cannot be told
    drawn_out: bool = False  # `draw` will give nothing more
    _again: deque[Work] = field(default_factory=deque)
    _seen: Counter[str] = field(default_factory=Counter)
    _idle_since: float | None = None  # by the monotonic clock

    def put_back(self, work: Work) -> None:
        """Roll this out again, before anything else."""
        self._again.append(work)

    @property
    def is_exhausted(self) -> bool:
        """Nothing is left now, and nothing will come unless a running rollout adds to the backlog."""
        return self.drawn_out and not self._again and not self.backlog()

    @property
    def idle_s(self) -> float:
        """Seconds for which there has been no item; 0 when the last call of `next` gave one."""
        return 0.0 if self._idle_since is None else time.monotonic() - self._idle_since

    async def next(self) -> Work | None:
        work = await self._next()
        self._idle_since = None if work else self._idle_since or time.monotonic()
        return work

    async def _next(self) -> Work | None:
        if self._again:
            return self._again.popleft()
        set_aside = skipped = 0
        while set_aside < MAX_SET_ASIDE_IN_A_ROW:
            drawn = await self._take()
            if drawn is None:
                return None
            key, item = drawn
            try:
                task = self.task_of(item)
            except BaseException:
                self.lost(key)
                raise
            if not self.is_done(key):
                if not self.is_set_aside(task):
                    return Work(item=item, key=key, task=task)
                set_aside += 1
            skipped += 1
            if skipped % 100 == 0:
                await asyncio.sleep(0)  # thousands of done items must not block the loop
        self.drawn_out = True
        return None

    async def _take(self) -> tuple[str, Item] | None:
        waiting = self.backlog()
        if waiting:
            item = waiting.pop(0)
            return f"b{content_key(as_json(item), self._seen)}", item  # as a restart will find it in the files
        if self.drawn_out:
            return None
        drawn = await self.draw()
        if drawn is None:
            self.drawn_out |= self.ends
        return drawn


@dataclass(eq=False)
class IndexedDraw:
    """Items by index, from 0; the index is the key. Indices that are done are not even asked for.

    Those in `late` come after all others: as they failed before, a restart would begin with nothing but failures.
    """

    get_item: Callable[[int], Awaitable[Item | None]]
    done: Container[str]
    late: Collection[str] = ()
    _index: int = 0
    _at_the_end: deque[str] | None = None  # late keys that are left, once the others are drawn

    async def __call__(self) -> tuple[str, Item] | None:
        while self._at_the_end is None:
            index, self._index = self._index, self._index + 1  # an index whose item cannot be made is not asked again
            key = str(index)
            if key not in self.done and key not in self.late:
                item = await of_hook(self.get_item(index), "get_item")
                if item is not None:
                    return key, item
                self._at_the_end = deque(sorted((key for key in self.late if key.isdecimal()), key=int))
        while self._at_the_end:
            key = self._at_the_end.popleft()
            item = await of_hook(self.get_item(int(key)), "get_item") if key not in self.done else None
            if item is not None:
                return key, item
        return None


@dataclass(eq=False)
class StreamDraw:
    """Items in whatever order `get_next_item` gives them, `late` ones last; keyed by content and occurrence.

    Where no restart will ask for the keys (`is_recorded` False) they are numbers: 10 million made-up items take 2 GB.
    """

    get_next_item: Callable[[], Awaitable[Item | None]]
    late: Container[str] = ()
    is_recorded: bool = True
    _drawn: int = 0
    _kept: deque[tuple[str, Item]] = field(default_factory=deque)  # late items that were drawn
    _seen: Counter[str] = field(default_factory=Counter)

    async def __call__(self) -> tuple[str, Item] | None:
        while (item := await of_hook(self.get_next_item(), "get_next_item")) is not None:
            self._drawn += 1
            key = content_key(item, self._seen) if self.is_recorded else f"n{self._drawn}"
            if key not in self.late:
                return key, item
            self._kept.append((key, item))
        return self._kept.popleft() if self._kept else None


async def of_hook(given: Awaitable[T], name: str) -> T:
    """Await what an author's hook returned.

    EnvironmentFault: it cannot be awaited, as `async` was forgotten, or gave a coroutine, as `await` was.
    """
    if not inspect.isawaitable(given):
        raise EnvironmentFault(f"{name} returned {given!r:.80} and no coroutine; write it as `async def {name}`")
    value = await given
    if inspect.iscoroutine(value):
        value.close()
        raise EnvironmentFault(f"{name} gave {value!r:.80}: a function that it calls is `async def`; await it there")
    return value


def content_key(item: Item, seen: Counter[str]) -> str:
    """`<hash>.<occurrence>`: equal items get 0, 1, 2, ... in the order in which they come; counted in `seen`."""
    digest = hashlib.blake2b(to_json(item, _lasting), digest_size=8).hexdigest()
    occurrence = seen[digest]
    seen[digest] += 1
    return f"{digest}.{occurrence}"


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def _lasting(value: object) -> object:
    """Return what names a value in every process: neither an address nor the order of a set does."""
    if isinstance(value, set | frozenset):
        return sorted(_ADDRESS.sub("", repr(each)) for each in value)
    kind = type(value)
    if kind.__repr__ is object.__repr__:
        names = dict.fromkeys([*getattr(value, "__dict__", ()), *_slots(kind)])
        return [kind.__qualname__, {name: getattr(value, name) for name in names if hasattr(value, name)}]
    text = _ADDRESS.sub("", shown := repr(value))
    to_bytes = getattr(value, "tobytes", None)
    if text != shown and callable(to_bytes):  # an image: its text says nothing of what it shows
        return [text, hashlib.blake2b(bytes(to_bytes()), digest_size=8).hexdigest()]  # pyright: ignore[reportArgumentType]
    return text


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        yield from [slots] if isinstance(slots, str) else slots
