import json
from typing import Any

import msgspec
import orjson
import pytest
from rollout_factory import make_group, write_groups

from atroposlib.data.lazy_group import LazyGroup, parse_lazily, split_rows
from atroposlib.data.rollout_files import Line
from atroposlib.data.sft import SftOptions, export_sft
from atroposlib.data.table import table_of
from atroposlib.errors import DataError

GROUP = make_group([1.0, 0.0])
SAID = ['{"tokens":[[1,2],[3]],"masks":[[4]]}', '":[[1]],"x', ':[[5]],"', "plain \\", '\\":[[6]]']
LAYOUTS = {
    "orjson": orjson.dumps(GROUP),
    "json.dumps": json.dumps(GROUP).encode(),
    "json with odd spaces": json.dumps(GROUP, separators=(" , ", " : ")).encode(),
    "lists last": orjson.dumps({key: GROUP[key] for key in sorted(GROUP, key=lambda key: key in ("tokens", "masks"))}),
    "lists apart": orjson.dumps({"tokens": GROUP["tokens"], "scores": GROUP["scores"], "masks": GROUP["masks"]}),
    "lists in lists": orjson.dumps({**GROUP, "distill_logprobs": [[[1.5, 2.5], [3.5]], [[4.5]]]}),
    "the same names further down": orjson.dumps({**GROUP, "env": None, "usage": {"tokens": [[7, 8]], "masks": [[9]]}}),
    "an object in the lists": orjson.dumps({**GROUP, "extra": [[1, {"tokens": [[7]]}]], "more": [[2]]}),
    "one response": orjson.dumps(make_group([1.0])),
    "no ids": orjson.dumps({**GROUP, "tokens": [], "masks": []}),
    "an empty response": orjson.dumps({**GROUP, "tokens": [[], [1]], "masks": [[], [1]]}),
    "nothing but scores": b'{"scores":[1,0]}',
    **{f"text {text}": orjson.dumps({**GROUP, "messages": [[{"role": "user", "content": text}]] * 2}) for text in SAID},
    **{f"task {text}": orjson.dumps({**GROUP, "task": text}) for text in SAID},
}


def plain(rows: Any) -> Any:
    return rows and [json.loads(bytes(row)) for row in rows]


@pytest.mark.parametrize("data", LAYOUTS.values(), ids=LAYOUTS)
def test_a_line_without_its_lists_says_what_the_whole_line_says(data, tmp_path):
    group = parse_lazily(Line(tmp_path / "a.jsonl", 1, 0, data + b"\n", True))
    whole = json.loads(data)
    assert group is not None
    for key in ("tokens", "masks", "messages"):
        assert plain(getattr(group, key)) == whole.get(key)
    assert (group.scores, group.task) == (whole["scores"], whole.get("task"))


SPOILED = {
    "a line that continues in the middle of another's ids": orjson.dumps(GROUP)[:40] + orjson.dumps(GROUP),
    "a line that continues in the middle of another's text": orjson.dumps(GROUP)[:-90] + orjson.dumps(GROUP),
    "a list closed twice": orjson.dumps(GROUP).replace(b"]],", b"]]],", 1),
    "a row missing": orjson.dumps({**GROUP, "tokens": GROUP["tokens"][:1]}),
    "ids in no list": orjson.dumps(GROUP).replace(b"],[", b"],7,[", 1),
    "tokens as a number": orjson.dumps({**GROUP, "tokens": 5}),
}


@pytest.mark.parametrize("data", SPOILED.values(), ids=SPOILED)
def test_spoiled_lines_are_refused(data, tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:3: "):
        parse_lazily(Line(tmp_path / "a.jsonl", 3, 0, data + b"\n", True))


def test_rows_are_split_where_a_list_ends():
    assert split_rows(b"[[1,2], [3],[]]") == [b"[1,2]", b"[3]", b"[]"]
    with pytest.raises(ValueError, match="between"):
        split_rows(b"[[1],7,[2]]")


def test_an_export_uses_the_index_and_checks_that_it_still_holds(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [make_group([1.0, 0.0])])
    table_of(path)
    report = export_sft(path, tmp_path / "o.jsonl", options=SftOptions(format="tokens"))
    assert report.records == 1
    write_groups(path, [make_group([1.0, 1.0], item="1"), make_group([1.0, 1.0], item="2")])
    assert export_sft(path, tmp_path / "p.jsonl").records == 4


STRETCHES = {
    "a prompt and an answer": ([-100, -100, 5, 6], (1, 0)),
    "two turns": ([-100, 5, -100, -100, 6], (2, 0)),
    "two turns of one token, as long as a spaced prompt": ([-100, 5, -100, -100], (1, 2)),
    "something behind the answer": ([-100, 5, 6, -100], (1, 1)),
    "no prompt": ([5, 6], (1, 0)),
    "nothing trained": ([-100, -100], (0, 0)),
    "empty": ([], (0, 0)),
    "no numbers": (["a"], (0, 0)),
}


@pytest.mark.parametrize("dump", [orjson.dumps, lambda value: json.dumps(value).encode()])
@pytest.mark.parametrize(("mask", "expected"), STRETCHES.values(), ids=STRETCHES)
def test_the_runs_of_a_mask_are_counted_in_its_json(mask, expected, dump):
    group = msgspec.json.decode(dump({"scores": [1.0], "masks": [mask]}), type=LazyGroup)
    assert group.stretches(0) == expected
