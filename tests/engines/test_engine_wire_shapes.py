"""The embedded engine's replies have the shape of those recorded from SGLang 0.5.11 (fixtures/*.json)."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
CHANGES_WITH_THE_CACHE = {"cached_tokens_details"}  # null when nothing was cached
OURS_TO_LEAVE_OUT = {"memory", "disaggregation"}  # of /v1/loads: memory of a GPU, parts of a cluster


def fixture(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def shape(value: Any) -> Any:
    """Keys in order, and the kind of every value; a list is as many shapes as it has different ones."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items() if key not in CHANGES_WITH_THE_CACHE]
    if isinstance(value, list):
        kinds = []
        for item in value:
            kinds += [] if shape(item) in kinds else [shape(item)]
        return kinds
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return type(value).__name__
    return "number"


def without_values(text_keyed: Any) -> Any:
    """`top_logprobs` of completions has texts as keys; any text will do."""
    return json.loads(json.dumps(text_keyed), object_hook=lambda item: {"text": 0.0} if is_text_keyed(item) else item)


def is_text_keyed(item: dict[str, Any]) -> bool:
    return len(item) == 1 and all(isinstance(value, float) for value in item.values())


def replay(live_engine: Any, recorded: Any) -> Any:
    request = recorded["request"]
    return live_engine.client.request(request["method"], request["path"], json=to_full_length(request["json"]))


def to_full_length(body: Any) -> Any:
    """The recorded request, whose drawn answers cannot end early by chance: every recorded one has its full length."""
    if not isinstance(body, dict):
        return body
    sampling = body.get("sampling_params", body)
    if not sampling.get("temperature"):
        return body
    changed = {**sampling, "ignore_eos": True}
    return {**body, "sampling_params": changed} if "sampling_params" in body else changed


GENERATE = [
    "generate_logprob", "generate_logprob_text_top2", "generate_n2", "generate_batch2_n2", "generate_eos",
    "generate_eos_no_stop_trim", "generate_stop_string", "generate_text", "generate_prompt_logprobs",
]  # fmt: skip
OPENAI = [
    "chat_n2_logprobs", "chat_extras", "completions_n2_logprobs", "completions_echo", "error_chat_model",
]  # fmt: skip
STATE = ["v1_models", "model_info", "get_load", "weight_version", "flush_cache", "health", "health_generate"]
CONTROL = ["abort_unknown", "pause_retract", "continue_after_retract", "update_weight_version"]
REFUSED = ["error_bad_temperature", "error_no_prompt", "error_chat_empty"]


@pytest.mark.parametrize("name", [*GENERATE, *OPENAI])
def test_reply_has_the_recorded_shape(live_engine, name):
    recorded = fixture(name)
    reply = replay(live_engine, recorded)
    assert reply.status_code == recorded["status"]
    assert shape(without_values(reply.json())) == shape(without_values(recorded["body"]))


@pytest.mark.parametrize("name", [*STATE, *CONTROL])
def test_state_and_control_replies_have_the_recorded_shape(live_engine, name):
    recorded = fixture(name)
    reply = replay(live_engine, recorded)
    assert reply.status_code == recorded["status"]
    is_json = reply.headers.get("content-type", "").startswith("application/json")
    assert shape(reply.json() if is_json else reply.text) == shape(recorded["body"])


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_word_for_word_those_of_sglang(live_engine, name):
    recorded = fixture(name)
    reply = replay(live_engine, recorded)
    assert (reply.status_code, reply.json()) == (recorded["status"], recorded["body"])


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "new_tokens"), [("error_over_context", 400, 200), ("error_too_long", 600, 1)]
)
def test_what_does_not_fit_the_context_is_refused_with_sglangs_sentence(live_engine, name, prompt_tokens, new_tokens):
    reply = live_engine.client.post(
        "/generate", json={"input_ids": [5] * prompt_tokens, "sampling_params": {"max_new_tokens": new_tokens}}
    )
    recorded = fixture(name)["body"]["error"]["message"]
    ours = {"8192": "512", "12000": "600", "8000": "400", "4000": "200", "9000": "600"}
    for theirs, value in ours.items():
        recorded = recorded.replace(theirs, value)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, recorded)


def test_greedy_tokens_are_those_sglang_gave(live_engine):
    for name in ("generate_eos", "generate_stop_string"):
        recorded = fixture(name)["body"]
        ours = replay(live_engine, fixture(name)).json()
        assert ours["output_ids"] == recorded["output_ids"]
        assert ours["text"] == recorded["text"]
        assert ours["meta_info"]["finish_reason"] == recorded["meta_info"]["finish_reason"]


def test_prompt_logprobs_are_close_to_those_sglang_gave(live_engine):
    recorded = fixture("generate_prompt_logprobs")
    theirs = [entry[0] for entry in recorded["body"]["meta_info"]["input_token_logprobs"][1:]]
    meta = replay(live_engine, recorded).json()["meta_info"]
    ours = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    assert sum(differences) / len(differences) < 0.2  # 8-bit weights against bf16


def test_stream_is_cumulative_and_has_the_recorded_shape(live_engine):
    recorded = fixture("generate_stream")
    lines = [line for line in replay(live_engine, recorded).text.split("\n\n") if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    theirs = [json.loads(line.removeprefix("data: ")) for line in recorded["last_lines"][:-1]]
    assert lines[-1] == recorded["last_lines"][-1] == "data: [DONE]"
    assert {key for key, _ in shape(events[-1])} == {key for key, _ in shape(theirs[-1])}
    assert set(events[-1]["meta_info"]) == set(theirs[-1]["meta_info"])
    assert events[0]["meta_info"]["finish_reason"] is None
    for earlier, later in itertools.pairwise(events):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]


def test_chat_stream_has_the_recorded_shape(live_engine):
    recorded = fixture("chat_stream")
    lines = [line for line in replay(live_engine, recorded).text.split("\n\n") if line]
    ours = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    theirs = [json.loads(line.removeprefix("data: ")) for line in recorded["first_lines"]]
    assert lines[-1] == "data: [DONE]"
    assert shape(ours[0]) == shape(theirs[0])
    assert shape(ours[1]) == shape(theirs[1])
    usage = json.loads(recorded["last_lines"][0].removeprefix("data: "))
    assert shape(ours[-1]) == shape(usage)
    assert ours[-2]["choices"][0]["finish_reason"] == "length"


def test_abort_reason_is_the_recorded_one(live_engine):
    recorded = fixture("abort_request_generate")["body"]["meta_info"]["finish_reason"]
    body = {"text": "Once", "rid": "to-abort", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    with live_engine.client.stream("POST", "/generate", json={**body, "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        live_engine.client.post("/abort_request", json={"rid": "to-abort"})
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events[-1]["meta_info"]["finish_reason"] == recorded
    assert 0 < len(events[-1]["output_ids"]) < 400


def test_loads_have_the_recorded_keys(live_engine):
    recorded = fixture("v1_loads")["body"]
    ours = live_engine.client.get("/v1/loads").json()
    assert list(ours) == list(recorded)
    assert [key for key in recorded["loads"][0] if key not in OURS_TO_LEAVE_OUT] == list(ours["loads"][0])
    assert list(ours["aggregate"]) == list(recorded["aggregate"])


def test_server_info_has_only_recorded_keys_and_tokenizer_and_engine(live_engine):
    ours = live_engine.client.get("/server_info").json()
    assert set(ours) - set(fixture("server_info")["body"]) == {"tokenizer_path", "engine"}
    assert ours == {**live_engine.client.get("/get_server_info").json(), "internal_states": ours["internal_states"]}


def test_metrics_use_recorded_names_and_kinds(live_engine):
    recorded = fixture("metrics_names")["types"]
    text = live_engine.client.get("/metrics").text
    ours = dict(line.removeprefix("# TYPE ").rsplit(" ", 1) for line in text.splitlines() if line.startswith("# TYPE"))
    assert {"sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"} <= set(ours)
    assert ours == {name: recorded[name] for name in ours}
