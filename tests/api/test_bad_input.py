"""Bad input gets a 4xx that names place, finding and expectation, and nothing of it is kept."""

import gzip
import json
import math
import zlib

import pytest
from api_testing import ENV, REGISTRATION, client_of, make_group, memory_app, started, uids

from atroposlib.api.edge import gunzip

JSON = {"Content-Type": "application/json"}


def changed(**values):
    return {**make_group(66), **values}


BAD_GROUPS = {
    "ragged masks": (changed(masks=[[1, 2, 3]] * 3 + [[1, 2]]), "masks[3] has 2 entries; expected 3"),
    "too few masks": (changed(masks=[[1, 2, 3]]), "masks has 1 entries; expected 4"),
    "too few scores": (changed(scores=[1.0]), "scores has 1 entries; expected 4"),
    "ragged logprobs": (changed(inference_logprobs=[[0.0]] * 4), "inference_logprobs[0] has 1 entries; expected 3"),
    "too few advantages": (changed(advantages=[[1.0]]), "advantages has 1 entries; expected 4"),
    "too few conversations": (changed(messages=[[]]), "messages has 1 entries; expected 4"),
    "nan score": (changed(scores=[1.0, float("nan"), 0.0, 0.0]), "scores[1] is nan"),
    "infinite logprob": (
        changed(ref_logprobs=[[0.0, 0.0, float("-inf")]] * 4), "ref_logprobs[0][2] is -inf; expected a finite number"),
    "empty group": ({"tokens": [], "masks": [], "scores": []}, "tokens is empty"),
    "empty sequence": (changed(tokens=[[1, 2, 3]] * 3 + [[]]), "tokens[3] is empty"),
    "digits as text": (changed(tokens=[["1", "2", "3"]] * 4), "tokens[0][0] is '1'; expected an integer"),
    "fractions": (changed(tokens=[[1, 2, 3.5]] * 4), "tokens[0][2] is 3.5; expected an integer"),
    "booleans": (changed(tokens=[[True, 2, 3]] * 4), "tokens[0][0] is True; expected an integer"),
    "rows in rows": (changed(tokens=[[1, [2], 3]] * 4), "tokens[0][1] is a list; expected an integer"),
    "rows in rows that make the right length": (changed(masks=[[[], [1, 2], 3]] * 4), "masks[0][0] is a list"),
    "a row too deep": (changed(ref_logprobs=[[[0.0, 0.0, 0.0]]] * 4), "ref_logprobs[0][0] is a list"),
    "negative token": (changed(tokens=[[1, -5, 3]] * 4), "tokens[0][1] is -5; expected an integer from 0"),
    "huge token": (changed(tokens=[[1, 10**30, 3]] * 4), "tokens[0][1] is 1000000000000000000000000000000"),
    "token above int32": (changed(tokens=[[1, 2**31, 3]] * 4), "tokens[0][1] is 2147483648"),
    "no scores": ({"tokens": [[1]], "masks": [[1]]}, "`scores`"),
    "null scores": (changed(scores=None), "scores is null"),
    "a key that is no text": (changed(overrides={"\ud800": float("nan")}), "overrides.\ud800 is nan; expected"),
    "messages of text": (changed(messages=[["hi"]] * 4), "messages[0][0] is 'hi'; expected an object"),
    "message without role": (changed(messages=[[{"content": ""}]] * 4), "messages[0][0] has no 'role'"),
    "message without content": (changed(messages=[[{"role": "user", "tool_calls": []}]] * 4), "has no 'content'"),
    "deep parameters": (changed(generation_params=json.loads('{"a":' * 500 + "1" + "}" * 500)), "nests deeper than 64"),
    "parameters as list": (changed(generation_params=[1]), "generation_params is a list; expected an object"),
    "negative env": (changed(env_id=-1), "env_id is -1"),
    "unknown env": (changed(env_id=99), "env_id is 99; expected a registered environment (0 to 0)"),
    "larger than a batch": (make_group(1, sequences=16), "batch_size is 8"),
    "a size no sum can fill": (make_group(1, sequences=3), "no batch of exactly 8"),
    "longer than the trainer takes": (make_group(1, tokens=600), "600 tokens, but the trainer's max_token_len is 512"),
    "a list": ([1], "Expected `object`"),
}  # fmt: skip


@pytest.mark.parametrize(("group", "sentence"), BAD_GROUPS.values(), ids=BAD_GROUPS)
async def test_a_bad_group_is_refused_with_a_sentence_and_the_next_good_one_works(group, sentence):
    client = await started(memory_app())
    answer = await client.post("/scored_data", content=json.dumps(group), headers=JSON)
    assert 400 <= answer.status_code < 500
    assert (
        sentence in json.loads(answer.text)["detail"][0]["msg"]
        if answer.status_code == 422 and isinstance(answer.json()["detail"], list)
        else sentence in answer.json()["detail"]
    )
    await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    assert uids(await client.get("/batch")) == [1, 2]


@pytest.mark.parametrize("number", ["1e999", "-1e400", "NaN", "Infinity", "9" * 400])
@pytest.mark.parametrize("field", ["scores", "inference_logprobs", "images"])
async def test_numbers_that_no_float_can_hold_are_refused(number, field):
    client = await started(memory_app())
    group = changed(**{field: ["@"] * 4 if field == "scores" else [["@"] * 3] * 4})
    body = json.dumps(group).replace('"@"', number)
    expected = 200 if field == "images" and number == "9" * 400 else 422
    assert (await client.post("/scored_data", content=body, headers=JSON)).status_code == expected


async def test_tiny_and_long_numbers_are_accepted():
    client = await started(memory_app())
    row = [1e-300, -1.2345678901234567e-05, -0.000012345678901234567]
    answer = await client.post("/scored_data", json=changed(inference_logprobs=[row] * 4))
    assert answer.json() == {"status": "received"}


async def test_an_escaped_bracket_in_a_string_hides_no_row_within_a_row():
    client = await started(memory_app())
    text = [[{"role": "user", "content": "<>" * 2}]] * 4
    body = json.dumps(changed(masks=[[[], [1, 2], 3]] * 4, messages=text)).replace("<", "\\u005b")
    answer = await client.post("/scored_data", content=body, headers=JSON)
    assert "masks[0][0] is a list; expected an integer" in answer.json()["detail"][0]["msg"]


async def test_a_key_with_a_zero_character_hides_no_other_key():
    client = await started(memory_app(), batch_size=4)
    assert (await client.post("/scored_data", json={"tokens\0": [[9]], "\0": 1, **make_group(3)})).status_code == 200
    assert uids(await client.get("/batch")) == [3]


async def test_of_two_equal_keys_the_last_counts_as_everywhere_in_python():
    client = await started(memory_app(), batch_size=4)
    body = json.dumps(make_group(2))[:-1] + ', "tokens": ' + json.dumps(make_group(3)["tokens"]) + "}"
    await client.post("/scored_data", content=body, headers=JSON)
    assert uids(await client.get("/batch")) == [3]


async def test_white_space_between_values_does_not_matter():
    client = await started(memory_app(), batch_size=4)
    await client.post("/scored_data", content=json.dumps(make_group(3), indent=3), headers=JSON)
    assert uids(await client.get("/batch")) == [3]


async def test_advantages_of_another_length_are_accepted():
    client = await started(memory_app())
    assert (await client.post("/scored_data", json=changed(advantages=[[1.0]] * 4))).status_code == 200


async def test_boolean_scores_count_as_one_and_zero():
    client = await started(memory_app(), batch_size=4)
    await client.post("/scored_data", json=changed(scores=[True, False, 1, 0.5]))
    assert (await client.get("/batch")).json()["batch"][0]["scores"] == [1.0, 0.0, 1.0, 0.5]


async def test_a_list_with_one_bad_group_stores_none():
    client = await started(memory_app())
    answer = await client.post("/scored_data_list", json=[make_group(1), changed(scores=[]), make_group(2)])
    assert answer.status_code == 422
    assert "group 1 of the list: scores has 0 entries" in answer.json()["detail"][0]["msg"]
    assert (await client.get("/status")).json()["queue_size"] == 0


GZIPPED = gzip.compress(json.dumps(make_group(1, tokens=400)).encode())
BAD_BODIES = {
    "not gzip": (b"plain", "gzip", 400),
    "cut gzip": (GZIPPED[:-20], "gzip", 400),
    "damaged gzip": (GZIPPED[:40] + bytes(40) + GZIPPED[80:], "gzip", 400),
    "gzip bomb": (gzip.compress(b" " * 3_000_000), "gzip", 413),
    "large body": (b" " * 2_000_000, "", 413),
    "deflate": (zlib.compress(b"{}"), "deflate", 415),
    "not JSON": (b'{"tokens": [[1,2', "", 422),
    "not UTF-8": (b'{"tokens": "\xff"}', "", 422),
    "nesting": (b'{"images":' + b"[" * 100_000 + b"]" * 100_000 + b',"tokens":[],"masks":[],"scores":[]}', "", 422),
    "nothing": (b"", "", 422),
}


@pytest.mark.parametrize(("body", "encoding", "status"), BAD_BODIES.values(), ids=BAD_BODIES)
async def test_a_body_that_cannot_be_read_is_refused(body, encoding, status):
    client = await started(memory_app(max_body_mb=1), batch_size=4)
    headers = {**JSON, "Content-Encoding": encoding} if encoding else JSON
    answer = await client.post("/scored_data", content=body, headers=headers)
    assert answer.status_code == status
    assert len(answer.text) < 2000
    await client.post("/scored_data", json=make_group(1))
    assert uids(await client.get("/batch")) == [1]


async def test_a_limit_may_be_infinite():
    client = await started(memory_app(max_body_mb=math.inf, max_queue_mb=math.inf))
    answer = await client.post("/scored_data", content=GZIPPED, headers={**JSON, "Content-Encoding": "gzip"})
    assert answer.json() == {"status": "received"}


async def test_a_group_may_come_in_several_gzip_members():
    client = await started(memory_app(), batch_size=4)
    text = json.dumps(make_group(1, tokens=400)).encode()
    body = b"".join(gzip.compress(part) for part in (b"", text[:5], text[5:6000], b"", text[6000:]))
    answer = await client.post("/scored_data", content=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert answer.json() == {"status": "received"}
    assert uids(await client.get("/batch")) == [1]


def test_a_body_of_empty_gzip_members_costs_no_more_than_its_length(monkeypatch):
    inflator, copied = zlib.decompressobj, [0]

    class Counting:
        def __init__(self, wbits):
            self._stream = inflator(wbits=wbits)

        def decompress(self, data, most):
            copied[0] += len(data)
            return self._stream.decompress(data, most)

        def __getattr__(self, name):
            return getattr(self._stream, name)

    monkeypatch.setattr("atroposlib.api.edge.zlib.decompressobj", Counting)
    body = gzip.compress(b"") * 5000
    assert gunzip(body, 1000) == b""
    assert copied[0] < 5001 * 5000


async def test_an_empty_group_id_is_none():
    client = await started(memory_app())
    for uid in (1, 2):
        await client.post("/scored_data", json=make_group(uid, group_id=""))
    assert uids(await client.get("/batch")) == [1, 2]


async def test_text_is_not_taken_for_json():
    client = await started(memory_app())
    answer = await client.post(
        "/scored_data", content=json.dumps(make_group(1)), headers={"Content-Type": "text/plain"}
    )
    assert answer.status_code == 415


BAD_REGISTRATIONS = {"zero": {"batch_size": 0}, "text": {"batch_size": "x"}, "way up": {"checkpoint_dir": "a/../../b"}}


@pytest.mark.parametrize("change", BAD_REGISTRATIONS.values(), ids=BAD_REGISTRATIONS)
async def test_a_bad_registration_is_refused(change):
    client = client_of(memory_app())
    assert (await client.post("/register", json={**REGISTRATION, **change})).status_code == 422
    assert (await client.get("/info")).json()["batch_size"] == -1


BAD_ENVS = {
    "name with a path": {"desired_name": "../../x"},
    "group of none": {"group_size": 0},
    "more than all": {"min_batch_allocation": 7.0},
}


@pytest.mark.parametrize("change", BAD_ENVS.values(), ids=BAD_ENVS)
async def test_a_bad_environment_is_refused(change):
    client = await started(memory_app(), envs=0)
    assert (await client.post("/register-env", json={**ENV, **change})).status_code == 422


@pytest.mark.parametrize("env_id", [99, -1, "x", None])
async def test_unknown_environments_are_told_so(env_id):
    client = await started(memory_app())
    assert 400 <= (await client.request("GET", "/status-env", json={"env_id": env_id})).status_code < 500
    assert 400 <= (await client.post("/disconnect-env", json={"env_id": env_id})).status_code < 500


async def test_a_disconnected_environment_must_register_again():
    client = await started(memory_app())
    assert (await client.post("/disconnect-env", json={"env_id": 0})).json() == {"status": "success"}
    assert (await client.get("/status-env?env_id=0")).status_code == 409
    assert (await client.post("/scored_data", json=make_group(1))).status_code == 409


async def test_a_batch_size_that_queued_groups_cannot_fill_is_refused():
    client = await started(memory_app())
    await client.post("/scored_data", json=make_group(1))
    answer = await client.post("/register", json={**REGISTRATION, "batch_size": 2})
    assert answer.status_code == 409
    assert "groups of 4 sequences are queued" in answer.json()["detail"]


async def test_a_full_queue_answers_503_with_a_time_to_come_back():
    client = await started(memory_app(max_queue_mb=0.0005))
    codes = [(await client.post("/scored_data", json=make_group(uid))).status_code for uid in range(3)]
    assert codes == [200, 503, 503]
    answer = await client.post("/scored_data", json=make_group(9))
    assert answer.headers["retry-after"] == "5"


async def test_part_groups_of_which_no_batch_can_be_made_are_refused_and_not_buffered():
    client = await started(memory_app(), batch_size=9)
    answer = await client.post("/scored_data", json=make_group(1, sequences=2))
    assert answer.status_code == 422
    assert "no batch of exactly 9" in answer.json()["detail"]
    assert (await client.get("/status")).json()["buffered_groups"] == 0


async def test_sizes_that_only_fit_together_are_taken_once_both_were_seen():
    client = await started(memory_app(), batch_size=8)
    codes = [(await client.post("/scored_data", json=make_group(n, sequences=n))).status_code for n in (3, 5, 3)]
    assert codes == [422, 200, 200]
    assert (await client.get("/batch")).json()["batch"] is not None


LONE_SURROGATES = {
    "/register": [{**REGISTRATION, name: "\ud800"} for name in ("wandb_group", "wandb_project", "checkpoint_dir")],
    "/register-env": [{**ENV, "desired_name": "a\udfffb"}],
}


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, all in LONE_SURROGATES.items() for body in all])
async def test_text_that_cannot_be_encoded_is_refused_and_changes_nothing(path, body):
    client = await started(memory_app())
    before = (await client.get("/status")).json()
    for _ in range(2):
        answer = await client.post(path, content=json.dumps(body), headers=JSON)
        assert answer.status_code == 422
        assert "lone surrogates" in answer.json()["detail"][0]["msg"]
    assert (await client.get("/status")).json() == before
    assert (await client.post("/register-env", json=ENV)).json()["env_id"] == 1
    assert (await client.post("/register", json=REGISTRATION)).status_code == 200
