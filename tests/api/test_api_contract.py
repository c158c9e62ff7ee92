"""What unmodified environments and trainers rely on, in process."""

import gzip
import json
import time

import pytest
from api_testing import ENV, REGISTRATION, client_of, make_group, memory_app, started, uids

from atroposlib.api.group_codec import GROUP_KEYS
from atroposlib.api.schemas import NoExample


async def test_a_fresh_server_knows_no_run():
    client = client_of(memory_app())
    assert (await client.get("/")).json() == {"message": "AtroposLib API"}
    assert (await client.get("/info")).json() == {"batch_size": -1, "max_token_len": -1}
    assert (await client.get("/wandb_info")).json() == {"group": None, "project": None}
    status = (await client.get("/status")).json()
    assert (status["current_step"], status["queue_size"]) == (0, 0)
    answer = await client.get("/batch")
    assert answer.status_code == 200
    assert answer.json()["status"] == "error"
    assert answer.json()["message"] == "Trainer not registered. Call /register first."
    assert answer.json()["batch"] is None
    example = (await client.get("/latest_example")).json()
    assert example["tokens"] == []
    assert sorted(example) == sorted(GROUP_KEYS)


async def test_registering_returns_a_number_and_shows_the_run():
    client = client_of(memory_app())
    assert isinstance((await client.post("/register", json=REGISTRATION)).json()["uuid"], int)
    assert (await client.get("/info")).json() == {"batch_size": 8, "max_token_len": 512}
    assert (await client.get("/wandb_info")).json() == {"group": "group", "project": "project"}


async def test_environments_wait_until_the_trainer_asked_for_its_first_batch():
    client = client_of(memory_app())
    assert (await client.post("/register-env", json=ENV)).json() == {"status": "wait for trainer to start"}
    await client.post("/register", json=REGISTRATION)
    assert (await client.post("/register-env", json=ENV)).json() == {"status": "wait for trainer to start"}
    await client.get("/batch")
    first = (await client.post("/register-env", json=ENV)).json()
    second = (await client.post("/register-env", json=ENV)).json()
    assert (first["status"], first["env_id"], first["wandb_name"]) == ("success", 0, "sums_0")
    assert (second["env_id"], second["wandb_name"]) == (1, "sums_1")
    assert (first["checkpoint_dir"], first["checkpoint_interval"], first["num_steps"]) == ("checkpoints", 10, 100)
    nameless = (await client.post("/register-env", json={**ENV, "desired_name": None, "weight": None})).json()
    assert nameless["wandb_name"] == "env_0"


@pytest.mark.parametrize("space", ["", " ", ' , "note": "\\u005b"'], ids=["plain", "spaces", "an escaped bracket"])
async def test_fields_that_no_response_has_come_as_empty_lists_from_environments_of_upstream(space):
    client = await started(memory_app(), batch_size=4)
    group = {**make_group(1), "group_overrides": {}, "overrides": [], "images": [], "messages": []}
    body = json.dumps({**group, "advantages": [], "ref_logprobs": [], "inference_logprobs": []})
    body = body.replace("[]", "[ ]")[:-1] + space + "}"
    answer = await client.post("/scored_data", content=body, headers={"Content-Type": "application/json"})
    assert answer.json() == {"status": "received"}
    [served] = (await client.get("/batch")).json()["batch"]
    assert (served["advantages"], served["ref_logprobs"], served["inference_logprobs"]) == ([], [], [])


async def test_batches_are_exact_first_in_first_out_and_count_one_step_each():
    client = await started(memory_app())
    for uid in range(6):
        assert (await client.post("/scored_data", json=make_group(uid))).json() == {"status": "received"}
    assert (await client.get("/status")).json()["queue_size"] == 6
    for step, expected in enumerate(([0, 1], [2, 3], [4, 5]), start=1):
        assert uids(await client.get("/batch")) == expected
        assert (await client.get("/status")).json()["current_step"] == step
    assert (await client.get("/batch")).text == '{"batch":null}'


async def test_every_served_group_has_exactly_the_known_keys():
    client = await started(memory_app(), batch_size=4)
    extra = {"overrides": [{"sft": True}] * 4, "unknown": 1, "group_id": "g"}
    await client.post("/scored_data", json=make_group(7, **extra))
    (group,) = (await client.get("/batch")).json()["batch"]
    assert sorted(group) == sorted(GROUP_KEYS)
    assert group["overrides"] == [{"sft": True}] * 4
    assert group["messages"] is None
    sent = make_group(7)
    assert {key: group[key] for key in sent} == sent


async def test_messages_come_back_as_they_were_sent():
    client = await started(memory_app(), batch_size=1)
    messages = [
        [{"role": "tool", "content": {"a": [1, None, "é"]}, "reward": None, "x": "y"}, {"role": "", "content": ""}]
    ]
    await client.post("/scored_data", json=make_group(1, sequences=1, messages=messages, images=["a", 1]))
    example = (await client.get("/latest_example")).json()
    assert example["messages"] == messages
    assert example["images"] == ["a", 1]


async def test_calls_of_tools_without_content_are_taken_and_served_with_null():
    client = await started(memory_app(), batch_size=1, group_size=1)
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [[{"role": "user", "content": "é"}, {"role": "assistant", "tool_calls": calls}]]
    await client.post("/scored_data", json=make_group(1, sequences=1, messages=messages))
    (group,) = (await client.get("/batch")).json()["batch"]
    assert group["messages"] == [[messages[0][0], {**messages[0][1], "content": None}]]


async def test_a_trainer_without_a_limit_takes_sequences_of_any_length():
    client = await started(memory_app(), batch_size=4)
    assert (await client.post("/register", json={**REGISTRATION, "batch_size": 4, "max_token_len": -1})).is_success
    assert (await client.get("/info")).json()["max_token_len"] == -1
    assert (await client.post("/scored_data", json=make_group(1, tokens=5000))).json() == {"status": "received"}
    assert uids(await client.get("/batch")) == [1]


@pytest.mark.parametrize("limit", [0, -2])
async def test_other_limits_below_one_are_refused(limit):
    answer = await client_of(memory_app()).post("/register", json={**REGISTRATION, "max_token_len": limit})
    assert answer.status_code == 422
    assert "-1" in answer.text


async def test_a_list_is_stored_in_order_and_answered_with_its_count():
    client = await started(memory_app())
    answer = await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    assert answer.json() == {"status": "received", "groups_processed": 2}
    assert (await client.post("/scored_data_list", json=[])).json() == {"status": "received", "groups_processed": 0}
    assert uids(await client.get("/batch")) == [1, 2]


async def test_part_groups_wait_in_a_buffer_and_leave_it_unmerged():
    client = await started(memory_app())
    answers = [(await client.post("/scored_data", json=make_group(uid, sequences=2))).json() for uid in (1, 2)]
    assert answers == [{"status": "buffered", "buffer_size": 2}, {"status": "buffered", "buffer_size": 0}]
    await client.post("/scored_data", json=make_group(3))
    assert uids(await client.get("/batch")) == [1, 2, 3]


async def test_gzip_bodies_are_taken():
    client = await started(memory_app(), batch_size=4)
    body = gzip.compress(json.dumps(make_group(5)).encode())
    headers = {"Content-Encoding": "GZIP", "Content-Type": "application/json"}
    assert (await client.post("/scored_data", content=body, headers=headers)).status_code == 200
    assert uids(await client.get("/batch")) == [5]


async def test_status_env_takes_its_id_as_body_or_in_the_query():
    client = await started(memory_app())
    by_body = await client.request("GET", "/status-env", json={"env_id": 0})
    by_query = await client.get("/status-env?env_id=0")
    assert by_body.json() == by_query.json()
    assert sorted(by_body.json()) == [
        "current_step", "env_weight", "max_group_size", "queue_size", "self_queue_size", "unallocated_fraction",
    ]  # fmt: skip


async def test_status_env_counts_in_units_of_the_asking_environment():
    client = await started(memory_app(), batch_size=64, envs=2)
    for uid in range(5):
        await client.post("/scored_data", json=make_group(uid, env_id=0))
    await client.post("/scored_data", json=make_group(9, sequences=8, env_id=1))
    mine = (await client.get("/status-env?env_id=0")).json()
    assert (mine["self_queue_size"], mine["max_group_size"], mine["queue_size"]) == (5, 8, 7)


async def test_a_trainer_that_registers_again_replaces_the_configuration_and_keeps_the_queue():
    client = await started(memory_app())
    await client.post("/scored_data", json=make_group(1))
    await client.post("/register", json={**REGISTRATION, "batch_size": 4, "starting_step": 30})
    assert (await client.get("/info")).json()["batch_size"] == 4
    assert uids(await client.get("/batch")) == [1]
    assert (await client.get("/status")).json()["current_step"] == 31


async def test_reset_forgets_everything_and_may_be_repeated():
    client = await started(memory_app())
    await client.post("/scored_data", json=make_group(1))
    for _ in range(2):
        answer = await client.get("/reset_data")
        assert answer.text == "Reset successful"
        assert answer.headers["content-type"].startswith("text/plain")
    assert (await client.get("/info")).json()["batch_size"] == -1
    assert (await client.get("/status")).json()["queue_size"] == 0
    assert (await client.get("/latest_example")).json()["tokens"] == []


async def test_a_group_before_any_trainer_is_kept_for_it():
    client = client_of(memory_app())
    assert (await client.post("/scored_data", json=make_group(1, sequences=8, env_id=None))).status_code == 200
    await client.post("/register", json=REGISTRATION)
    assert uids(await client.get("/batch")) == [1]


async def test_the_same_group_id_is_stored_once():
    client = await started(memory_app(), batch_size=4)
    answers = [(await client.post("/scored_data", json=make_group(1, group_id="a"))).json() for _ in range(2)]
    assert answers == [{"status": "received"}, {"status": "received", "duplicate": True}]
    in_a_list = [make_group(2, group_id="b"), make_group(3, group_id="b"), make_group(1, group_id="a")]
    assert (await client.post("/scored_data_list", json=in_a_list)).json()["duplicates"] == 2
    assert [uids(await client.get("/batch")) for _ in range(3)] == [[1], [2], None]


async def test_equal_groups_without_id_over_a_living_connection_are_different_groups():
    client = await started(memory_app(), batch_size=8)
    for _ in range(2):
        await client.post("/scored_data", json=make_group(1))
    assert uids(await client.get("/batch")) == [1, 1]


async def test_a_lease_is_delivered_again_until_it_is_acknowledged(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("atroposlib.api.batches.time.monotonic", lambda: now[0])
    client = await started(memory_app())
    await client.post("/scored_data_list", json=[make_group(uid) for uid in (1, 2, 3, 4)])
    first = (await client.get("/batch?lease_s=10")).json()
    now[0] += 11
    again = (await client.get("/batch?lease_s=10")).json()
    assert again == first
    assert (await client.get("/status")).json()["current_step"] == 1
    for _ in range(2):
        assert (await client.post("/batch/ack", json={"batch_id": again["batch_id"]})).json() == {"status": "success"}
    now[0] += 11
    assert uids(await client.get("/batch")) == [3, 4]
    assert (await client.post("/batch/ack", json={"batch_id": "never"})).status_code == 404


async def test_a_trainer_that_registers_again_gets_what_it_had_leased_first():
    client = await started(memory_app())
    await client.post("/scored_data_list", json=[make_group(uid) for uid in range(6)])
    for _ in range(2):
        await client.get("/batch?lease_s=600")
    await client.post("/register", json={**REGISTRATION, "starting_step": 7})
    batches = [uids(await client.get("/batch?lease_s=600")) for _ in range(3)]
    assert batches == [[0, 1], [2, 3], [4, 5]]
    assert (await client.get("/status")).json()["current_step"] == 10


async def test_several_pollers_get_different_batches():
    client = await started(memory_app())
    await client.post("/scored_data_list", json=[make_group(uid) for uid in range(4)])
    leases = [(await client.get("/batch?lease_s=60")).json() for _ in range(3)]
    assert [uids(lease) for lease in leases] == [[0, 1], [2, 3], None]


async def test_a_minimum_allocation_is_kept_and_a_silent_environment_stops_counting(monkeypatch):
    app = memory_app(env_timeout_s=60)
    client = await started(app, min_batch_allocation=0.5)
    await client.post("/register-env", json=ENV)
    await client.get("/status-env?env_id=0")
    await client.post("/scored_data_list", json=[make_group(uid, env_id=1) for uid in (1, 2, 3)])
    assert uids(await client.get("/batch")) is None
    assert "sums_0" in (await client.get("/status")).json()["waiting_for"]
    await client.post("/scored_data", json=make_group(9, env_id=0))
    assert uids(await client.get("/batch")) == [1, 9]
    now = time.monotonic
    monkeypatch.setattr("atroposlib.api.run.time.monotonic", lambda: now() + 61)
    assert uids(await client.get("/batch")) == [2, 3]


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ([], "nobody has called POST /register"),
        (["register"], "first GET /batch"),
        (["register", "batch"], "an environment"),
        (["register", "batch", "env", "group"], "4 of 8"),
    ],
)
async def test_status_says_what_the_next_batch_waits_for(setup, expected):
    client = client_of(memory_app())
    steps = {
        "register": lambda: client.post("/register", json=REGISTRATION),
        "batch": lambda: client.get("/batch"),
        "env": lambda: client.post("/register-env", json=ENV),
        "group": lambda: client.post("/scored_data", json=make_group(1)),
    }
    for step in setup:
        await steps[step]()
    assert expected in (await client.get("/status")).json()["waiting_for"]


async def test_metrics_count_groups_and_requests():
    client = await started(memory_app(), batch_size=4)
    await client.post("/scored_data", json=make_group(1))
    await client.get("/batch")
    text = (await client.get("/metrics")).text
    assert 'atropos_groups_received_total{env="0"} 1.0' in text
    assert "atropos_batches_delivered_total 1.0" in text
    assert 'atropos_request_seconds_count{route="/scored_data",status="200"} 1.0' in text


async def test_openapi_describes_every_route_with_examples():
    document = (await client_of(memory_app()).get("/openapi.json")).json()
    assert {"/scored_data", "/scored_data_list", "/batch", "/batch/ack", "/status-env"} <= set(document["paths"])
    assert document["components"]["schemas"]["ScoredData"]["example"]["scores"] == [1.0, -1.0]


BODIES = {
    "no JSON": (b"{", {}),
    "no text": (b"\xff\xfe{", {}),
    "nothing": (b"", {}),
    "another kind of JSON": (b"7", {}),
    "unknown names": (b'{"batch_id": "x", "env_id": 7}', {}),
    "another type": (b"{}", {"content-type": "text/plain"}),
    "no gzip": (b"x", {"content-encoding": "gzip"}),
    "too much": (b"x" * 2_000_000, {}),
    "another site's": (b"{}", {"sec-fetch-site": "cross-site"}),
}


@pytest.mark.parametrize(("body", "headers"), BODIES.values(), ids=BODIES)
async def test_openapi_names_every_status_that_a_bad_body_gets(body, headers):
    client = await started(memory_app(max_body_mb=1), batch_size=4)
    document = (await client.get("/openapi.json")).json()
    for path in (path for path, methods in document["paths"].items() if "post" in methods):
        answer = await client.post(path, content=body, headers={"content-type": "application/json", **headers})
        assert str(answer.status_code) in document["paths"][path]["post"]["responses"], (path, answer.text)


async def test_openapi_describes_the_example_before_there_is_one():
    client = client_of(memory_app())
    NoExample.model_validate((await client.get("/latest_example")).json(), strict=True)
    document = (await client.get("/openapi.json")).json()
    answer = document["paths"]["/latest_example"]["get"]["responses"]["200"]
    assert answer["content"]["application/json"]["schema"]["anyOf"] == [
        {"$ref": f"#/components/schemas/{name}"} for name in ("ScoredData", "NoExample")
    ]
