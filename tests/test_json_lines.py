"""A record is one line for every way of splitting lines, whatever a model wrote."""

import json

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from atroposlib.json_lines import one_line

EVERY_SEPARATOR = "a\x85b\u2028c\u2029d\r\n\v\f\x1c\x1d\x1e e"


@given(st.text())
@example(EVERY_SEPARATOR)
def test_any_text_stays_on_one_line_and_is_read_back(text):
    line = one_line(orjson.dumps({text: text}))
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {text: text}
