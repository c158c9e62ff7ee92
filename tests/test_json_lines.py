"""A record is one line for every way of splitting lines, whatever a model wrote."""

import json
import math

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atroposlib.json_lines import object_in, one_line, read_leniently, read_object

EVERY_SEPARATOR = "a\x85b\u2028c\u2029d\r\n\v\f\x1c\x1d\x1e e"


@given(st.text())
@example(EVERY_SEPARATOR)
def test_any_text_stays_on_one_line_and_is_read_back(text):
    line = one_line(orjson.dumps({text: text}))
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {text: text}


FILES = {
    "an object": (b'{"a": 1}', {"a": 1}),
    "with a mark of its byte order": (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
    "a list": (b"[1]", None),
    "torn": (b'{"a": ', None),
    "no text": (b'{"a": "\xff"}', None),
    "too deep": (b'{"a":' * 600 + b"1" + b"}" * 600, None),
    "brackets in a text": (b'{"a": "' + b"[" * 600 + b'\\""}', {"a": "[" * 600 + '"'}),
    "empty": (b"", None),
}


@pytest.mark.parametrize(("data", "found"), FILES.values(), ids=FILES)
def test_a_file_holds_an_object_or_none(tmp_path, data, found):
    (tmp_path / "a.json").write_bytes(data)
    assert read_object(tmp_path / "a.json") == found
    assert read_object(tmp_path / "b.json") is None


def test_an_object_may_hold_nan():
    assert math.isnan(object_in(b'{"loss": NaN}')["loss"])


def test_depth_has_the_same_end_in_every_python():
    """The parser of Python 3.14 reads what that of 3.11 refuses."""
    nested = b'{"score": NaN, "a": ' + b"[" * 499 + b"]" * 499 + b"}"
    assert read_leniently(nested)["score"] is None
    with pytest.raises(RecursionError, match="500 levels"):
        read_leniently(nested.replace(b"[]", b"[[]]"))
