"""Where items come from and how they are named."""

import functools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from atroposlib.json_lines import as_json
from atroposlib.rollouts.source import IndexedDraw, ItemSource, StreamDraw, Work, content_key


def source_of(draw, *, done=(), set_aside=(), backlog=None, ends=True, **options):
    waiting = [] if backlog is None else backlog
    return ItemSource(
        draw,
        is_done=set(done).__contains__,
        task_of=lambda item: item["task"] if isinstance(item, dict) else "t",
        is_set_aside=set(set_aside).__contains__,
        backlog=lambda: waiting,
        ends=ends,
        **options,
    )


def stream(items):
    left = list(items)

    async def get_next_item():
        return left.pop(0) if left else None

    return StreamDraw(get_next_item)


def indexed(items, done=()):
    async def get_item(index):
        return items[index] if index < len(items) else None

    return IndexedDraw(get_item, set(done))


async def take_all(source):
    taken = []
    while work := await source.next():
        taken.append(work)
    return taken


async def test_items_by_index_are_named_by_it_and_done_ones_are_not_asked_for():
    works = await take_all(source_of(indexed(["a", "b", "c"], done={"1"})))
    assert [(work.key, work.item) for work in works] == [("0", "a"), ("2", "c")]


async def test_items_that_nobody_records_are_not_remembered():
    draw = stream(["x", "y", "x"])
    draw.is_recorded = False
    works = await take_all(source_of(draw))
    assert [work.item for work in works] == ["x", "y", "x"]
    assert len({work.key for work in works}) == 3
    assert not draw._seen


async def test_equal_items_of_a_stream_have_different_names_that_are_the_same_next_time():
    first = [work.key for work in await take_all(source_of(stream(["x", "y", "x"])))]
    again = [work.key for work in await take_all(source_of(stream(["x", "y", "x"])))]
    assert len(set(first)) == 3
    assert first == again


async def test_done_items_of_a_stream_are_skipped():
    keys = [work.key for work in await take_all(source_of(stream("xyx")))]
    works = await take_all(source_of(stream("xyx"), done=keys[:2]))
    assert [work.key for work in works] == keys[2:]


async def test_the_backlog_comes_before_new_items_and_first_in_first_out():
    works = await take_all(source_of(stream(["new"]), backlog=["old", "older"]))
    assert [work.item for work in works] == ["old", "older", "new"]


async def test_what_was_put_back_comes_first():
    source = source_of(stream(["new"]))
    source.put_back(Work("again", "k", "t"))
    assert (await source.next()).item == "again"


async def test_items_of_a_task_set_aside_are_skipped_and_the_others_go_on():
    items = [{"task": "bad"}, {"task": "good"}, {"task": "bad"}]
    works = await take_all(source_of(indexed(items), set_aside={"bad"}))
    assert [work.task for work in works] == ["good"]


async def test_a_source_with_nothing_but_broken_tasks_ends():
    async def get_item(index):
        return {"task": "bad"}

    source = source_of(IndexedDraw(get_item, set()), set_aside={"bad"})
    assert await source.next() is None
    assert source.is_exhausted


async def test_none_ends_the_source_only_where_it_means_the_end():
    ending, waiting = source_of(stream([])), source_of(stream([]), ends=False)
    assert await ending.next() is None
    assert await waiting.next() is None
    assert ending.is_exhausted
    assert not waiting.is_exhausted


async def test_an_index_whose_item_cannot_be_made_is_not_asked_again():
    asked = []

    async def get_item(index):
        asked.append(index)
        if index == 0:
            raise OSError("bad record")
        return "fine" if index == 1 else None

    source = source_of(IndexedDraw(get_item, set()))
    with pytest.raises(OSError, match="bad record"):
        await source.next()
    assert (await source.next()).key == "1"
    assert asked == [0, 1]


def test_items_that_are_not_json_have_keys_too():
    assert content_key(({1, 2}, object), Counter()).endswith(".0")


NAMING = """
from collections import Counter
from dataclasses import dataclass
from atroposlib.rollouts.source import content_key
class Level:
    def __init__(self):
        self.words = {"b", "a", "c"}
print(content_key({"level": Level(), "words": {"x", "y", "z"}}, Counter()))
"""


def test_objects_and_sets_have_the_same_key_in_every_process():
    keys = {
        subprocess.run(
            [sys.executable, "-c", NAMING], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "12"
    }
    assert len(keys) == 1


def test_numbers_beyond_64_bits_and_broken_text_have_keys():
    keys = {content_key(item, Counter()) for item in (10**40, 10**40 + 1, "\ud83d", {"n": -(10**30)})}
    assert len(keys) == 4


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Picture:
    """Like an image of PIL: its text holds an address and says nothing of what it shows."""

    def __init__(self, shown):
        self.shown = shown

    def __repr__(self):
        return f"<Picture at {hex(id(self))}>"

    def tobytes(self):
        return self.shown


def cyclic(value):
    item = {"value": value}
    item["parent"] = {"child": item}
    return item


@pytest.mark.parametrize(
    ("make", "tells_apart"),
    [
        (lambda value: {"check": lambda: value}, False),
        (lambda value: {"check": functools.partial(int, value)}, True),
        (lambda value: {"check": Slotted(value).__init__}, False),
        (Slotted, True),
        (lambda value: Picture(bytes([value])), True),
        (cyclic, True),
        (lambda value: {(1, value): "a board"}, True),
    ],
    ids=["function", "partial", "method", "slots", "image", "cycle", "tuple keys"],
)
def test_an_items_name_holds_no_address(make, tells_apart):
    kept = [make(1) for _ in range(2)]  # at different addresses
    names = [content_key(item, Counter()) for item in (*kept, make(2))]
    assert names[0] == names[1]
    assert (names[1] != names[2]) is tells_apart


@pytest.mark.parametrize("item", [{1, 2}, b"bytes", Path("a/b"), (1, (2, 3))], ids=repr)
async def test_a_backlog_item_has_the_name_that_it_has_after_a_restart(item):
    (now,) = await take_all(source_of(stream([]), backlog=[item]))
    (later,) = await take_all(source_of(stream([]), backlog=[as_json(item)]))
    assert now.key == later.key


async def test_the_key_of_an_item_whose_task_cannot_be_told_is_given_back():
    lost = []
    source = source_of(indexed([{"no": "task"}, {"task": "t"}]), lost=lost.append)
    with pytest.raises(KeyError):
        await source.next()
    assert lost == ["0"]
    assert [work.key for work in await take_all(source)] == ["1"]
