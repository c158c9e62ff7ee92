"""What is proven good without parsing is what a parser finds good, and lifting it out of a body changes nothing."""

import json
import math

import msgspec
import orjson
import pytest
from api_testing import make_group
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api import lifting, number_rows
from atroposlib.api.lifting import lift_matrices
from atroposlib.api.number_rows import proven_rows
from atroposlib.api.payload import GROUP_KEYS, read_group, read_list
from atroposlib.errors import GroupError

TOKENS = st.integers(0, 9_999_999)
MASKS = st.integers(-9_999_999, 9_999_999)
LOGPROBS = st.floats(-100, 1) | st.floats(-1e-4, 0) | st.sampled_from([0.0, -0.0, 1e-300, -5e-324, 0])


def matrices(values):
    return st.lists(st.lists(values, min_size=1, max_size=60), min_size=1, max_size=5)


def rows_of(text: bytes, *, integers: bool, signed: bool = True) -> list[int] | None:
    return proven_rows(memoryview(text), integers=integers, signed=signed)


@pytest.mark.parametrize(
    ("values", "integers", "signed"), [(TOKENS, True, False), (MASKS, True, True), (LOGPROBS, False, True)]
)
@pytest.mark.parametrize("dumps", [lambda m: json.dumps(m).encode(), orjson.dumps], ids=["json", "orjson"])
def test_what_encoders_write_is_proven(values, integers, signed, dumps):
    @given(matrices(values))
    @settings(max_examples=60, deadline=None)
    def check(matrix):
        assert rows_of(dumps(matrix), integers=integers, signed=signed) == [len(row) for row in matrix]

    check()


PIECES = [
    "0",
    "1",
    "7",
    "00",
    "12345678",
    "9" * 70,
    ",",
    ", ",
    " ",
    "-",
    ".",
    "e",
    "e-",
    "e+",
    "E",
    "[",
    "]",
    "], [",
    '"',
    "n",
    "\n",
]


@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    matrices(st.integers(-300, 300) | st.floats(-9, 9)).map(json.dumps),
    st.integers(0, 10**6),
    st.booleans(),
)
@settings(max_examples=1000, deadline=None)
def test_whatever_is_proven_is_a_matrix_of_good_numbers(inserted, text, place, integers):
    at = place % len(text)
    broken = text[:at] + inserted + text[at + place % 3 :]
    lengths = rows_of(broken.encode(), integers=integers)
    if lengths is not None:
        matrix = msgspec.json.decode(broken, type=list[list[int]] if integers else list[list[float]])
        assert [len(row) for row in matrix] == lengths
        assert all(math.isfinite(value) for row in matrix for value in row)


NOT_PROVEN = [
    "[[01]]", "[[-01.5]]", "[[1.2.3]]", "[[1e-5.1]]", "[[1e-5e-5]]", "[[1e5]]", "[[1e-]]", "[[.5]]", "[[5.]]", "[[+1]]",
    "[[1-2]]", "[[--1]]", "[[1 2]]", "[[1,,2]]", "[[1,]]", "[[,1]]", "[[]]", "[[1],]", "[[1],[]]", "[[1]][[2]]",
    "[[1]1,[2]]", "[[1],2,[3]]", "[1]", "[[[1]]]", "[[1], [[2]]]", "[[1],  [2]]", "[[1\n]]", "[[1 ]]", "[[ 1]]",
    "[[1]]]", "[[1], [2]", "[[-]]", "[[0.1-]]", "[[-.1]]", "[[" + "1" * 400 + "]]", "[[NaN]]", "[[1e-5", "[", "",
]  # fmt: skip


@pytest.mark.parametrize("text", NOT_PROVEN)
def test_nothing_else_is_proven(text):
    assert rows_of(text.encode(), integers=False) is None


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 1000])
def test_digit_runs_over_the_borders_of_words_keep_their_grammar(length):
    for lead in range(length - 30, length):
        head = "[[" + "7," * (lead // 2) + "7" * (lead % 2)
        assert rows_of(f"{head}0.{'3' * 40},1]]".encode(), integers=False) is not None
        assert rows_of(f"{head}0.{'3' * 40}.1]]".encode(), integers=False) is None
        assert rows_of(f"{head}0.{'3' * 40}e-05,1]]".encode(), integers=False) is not None
        assert rows_of(f"{head}0.{'3' * 40}e-05.1]]".encode(), integers=False) is None


def test_a_text_looked_at_in_pieces_is_judged_as_a_whole(monkeypatch):
    monkeypatch.setattr(number_rows, "_CHUNK", 64)
    matrix = [[-0.25 * i, -1e-05, 1.0] * i for i in range(1, 12)]
    text = json.dumps(matrix).encode()
    assert rows_of(text, integers=False) == [len(row) for row in matrix]
    for at in range(2, len(text) - 2):
        for wrong in (b"[", b"e", b" ", b"--"):
            assert rows_of(text[:at] + wrong + text[at:], integers=False) is None


def test_integers_above_seven_digits_are_left_to_the_careful_reader():
    assert rows_of(b"[[1, 9999999]]", integers=True) == [2]
    assert rows_of(b"[[1, 10000000]]", integers=True) is None
    group = make_group(1) | {"tokens": [[2**31 - 1, 1, 2]] * 4}
    assert read_group(json.dumps(group).encode()).sequences == 4


def content_of(body: str) -> dict:
    return json.loads(read_group(body.encode()).json())


@pytest.fixture
def lift_small_ones(monkeypatch):
    monkeypatch.setattr(lifting, "WORTH_BYTES", 1)


@pytest.mark.usefixtures("lift_small_ones")
def test_a_lifted_group_is_stored_as_it_came():
    group = make_group(5, tokens=70) | {"ref_logprobs": [[-1e-05] * 70] * 4, "advantages": [[0.5]] * 4}
    body = json.dumps(group)
    assert len(lift_matrices(body.encode()).matrices) == 5
    assert content_of(body) == dict.fromkeys(GROUP_KEYS) | group


TRICKS = {
    "deeper": '"generation_params": {"tokens": [[1, 2]]}, ',
    "repeated": '"masks": [[7, 7, 7], [7, 7, 7], [7, 7, 7], [7, 7, 7]], ',
    "in an escaped key": r'"a\"tokens": [[1, 2]], ',
    "in a text": r'"messages": [[{"role": "user", "content": "{\"tokens\": [[1, 2]]}"}], [], [], []], ',
}


@pytest.mark.usefixtures("lift_small_ones")
@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS)
def test_a_matrix_in_another_place_is_left_there(trick):
    body = "{" + trick + json.dumps(make_group(3))[1:]
    assert content_of(body) == {key: json.loads(body).get(key) for key in GROUP_KEYS}


@pytest.mark.usefixtures("lift_small_ones")
@pytest.mark.parametrize("end", ["", ",", "]", "}}", '"', ", 1"])
def test_a_body_that_is_no_json_is_refused_also_when_its_matrices_are_good(end):
    with pytest.raises(GroupError):
        read_group(json.dumps(make_group(3))[:-1].encode() + end.encode())


@pytest.mark.parametrize("worth", [1, 60, 1 << 20])
def test_groups_of_a_list_keep_their_own_matrices(worth, monkeypatch):
    monkeypatch.setattr(lifting, "WORTH_BYTES", worth)
    payloads = read_list(json.dumps([make_group(uid, tokens=uid + 3) for uid in range(5)]).encode())
    assert [payload.longest for payload in payloads] == [3, 4, 5, 6, 7]
    assert [json.loads(payload.json())["tokens"][0][0] for payload in payloads] == [0, 1, 2, 3, 4]
