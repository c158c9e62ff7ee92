"""The binary form of a group: the numbers that come out are those that went in, and no bytes make the server fail."""

import json
import math

import msgspec
import numpy as np
import pytest
from api_testing import make_group, memory_app, started, uids
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api.group_checks import read_binary, read_group
from atroposlib.api.group_codec import (
    GROUP_KEYS,
    GROUPS_TYPE,
    decode_batch,
    encode_group,
    group_json,
    join_batch,
    join_groups,
)
from atroposlib.errors import GroupError

BINARY = {"Content-Type": GROUPS_TYPE}
floats = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def groups(draw):
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))

    def rows(values):
        return [draw(st.lists(values, min_size=n, max_size=n)) for n in lengths]

    group = {
        "tokens": rows(st.integers(0, 2**31 - 1)),
        "masks": rows(st.integers(-(2**31), 2**31 - 1)),
        "scores": draw(st.lists(floats, min_size=len(lengths), max_size=len(lengths))),
        "inference_logprobs": rows(
            draw(
                st.sampled_from(
                    [floats, st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-(2**62), 2**62)]
                )
            )
        ),
        "advantages": draw(
            st.none() | st.lists(st.lists(floats, max_size=3), min_size=len(lengths), max_size=len(lengths))
        ),
        "generation_params": draw(st.none() | st.dictionaries(st.text(max_size=3), st.integers(-(2**80), 2**80))),
    }
    return {name: value for name, value in group.items() if value is not None}


@settings(max_examples=60, deadline=None)
@given(groups())
def test_json_goes_in_and_comes_out_with_the_very_same_numbers(group):
    stored = read_group(json.dumps(group).encode())
    found = json.loads(stored.json())
    assert list(found) == list(GROUP_KEYS)
    assert {name: value for name, value in found.items() if value is not None} == group
    assert decode_batch(join_batch([stored.content], "b"), arrays=False)["batch"][0] == found


@settings(max_examples=60, deadline=None)
@given(groups())
def test_our_own_clients_store_what_json_clients_store(group):
    group["generation_params"] = None
    by_json = read_group(json.dumps(group).encode())
    (by_binary,) = read_binary(join_groups([encode_group(group)]))
    assert json.loads(by_json.json()) == json.loads(by_binary.json())
    assert (by_json.sequences, by_json.longest) == (by_binary.sequences, by_binary.longest)


def test_floats_are_narrow_where_that_is_exact():
    def size(value):
        return len(encode_group({**make_group(1), "inference_logprobs": [[value] * 300] * 4}))

    assert size(0.1) - size(0.5) == 4 * 4 * 300


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_binary_is_refused_or_is_another_good_group(data):
    body = bytearray(join_groups([encode_group(make_group(1, env_id=None))]))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    for damaged in (bytes(body), bytes(body[:cut])):
        try:
            for group in read_binary(damaged):
                assert math.isfinite(json.loads(group_json(group.content))["scores"][0])
        except GroupError:
            pass


BAD = {
    "negative token": ({"tokens": [[1, 2, 3]] * 3 + [[1, -5, 3]]}, "tokens[3][1] is -5"),
    "infinite logprob": ({"ref_logprobs": [[0.0, math.inf, 1.0]] * 4}, "ref_logprobs[0][1] is inf"),
    "not a number": ({"inference_logprobs": [np.array([0.0, np.nan, 1.0])] * 4}, "inference_logprobs[0][1]"),
    "ragged": ({"masks": [[1, 2, 3]] * 3 + [[1, 2]]}, "masks[3] has 2 entries; expected 3"),
    "fractions": ({"tokens": [[1, 2, 3.5]] * 4}, "tokens[0][2] is 3.5; expected an integer"),
    "above 32 bits": ({"tokens": [np.array([1, 2, 2**40])] * 4}, "tokens[0][2] is 1099511627776"),
    "no tokens": ({"tokens": None}, "no `tokens`"),
}


@pytest.mark.parametrize(("change", "sentence"), BAD.values(), ids=BAD)
async def test_a_bad_binary_group_is_named_like_a_bad_json_group(change, sentence):
    client = await started(memory_app())
    body = join_groups([encode_group(make_group(1)), encode_group({**make_group(2), **change})])
    answer = await client.post("/scored_data_list", content=body, headers=BINARY)
    assert answer.status_code == 422
    assert sentence in answer.json()["detail"][0]["msg"]
    assert "group 1 of the list" in answer.json()["detail"][0]["msg"]
    assert (await client.get("/status")).json()["queue_size"] == 0


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91\xc0", msgspec.msgpack.encode([{"head": b"[]"}]), b"\x91" * 2000])
async def test_what_is_no_group_at_all_is_refused(body):
    client = await started(memory_app())
    answer = await client.post("/scored_data_list", content=body, headers=BINARY)
    assert 400 <= answer.status_code < 500


async def test_old_and_new_clients_meet_in_one_queue():
    client = await started(memory_app())
    await client.post("/scored_data_list", content=join_groups([encode_group(make_group(1))]), headers=BINARY)
    await client.post("/scored_data", json=make_group(2))
    batch = await client.get("/batch")
    assert uids(batch) == [1, 2]
    assert {**make_group(1)}.items() <= batch.json()["batch"][0].items()
