"""Abort, pause, weights: what happens to requests that run meanwhile. On the live engine."""

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

LONG = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture
def background():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _runs_again_afterwards(live_engine):
    yield
    live_engine.client.post("/continue_generation", json={})
    live_engine.client.post("/update_weight_version", json={"new_version": "default"})


class Streamed:
    """One streamed request in the background; `started` is set by its first token."""

    def __init__(self, live_engine: Any, pool: ThreadPoolExecutor, **body: Any) -> None:
        self.started = threading.Event()
        self._last: Future[Any] = pool.submit(self._run, f"{live_engine.url}/generate", {**body, "stream": True})

    def _run(self, url: str, body: Any) -> Any:
        last = None
        with httpx.stream("POST", url, json=body, timeout=120) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    self.started.set()
        return last

    def result(self) -> Any:
        return self._last.result(timeout=120)


def post(live_engine: Any, path: str, **body: Any) -> Any:
    reply = live_engine.client.post(path, json=body)
    return reply.status_code, reply.json() if reply.content else None


def test_abort_by_the_requests_id_ends_all_its_n(live_engine, background):
    one = Streamed(
        live_engine, background, text="Hi", rid="many", sampling_params={**LONG, "n": 4, "max_new_tokens": 400}
    )
    assert one.started.wait(60)
    assert post(live_engine, "/abort_request", rid="many") == (200, None)
    assert one.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert live_engine.client.get("/v1/loads").json()["aggregate"]["total_reqs"] == 0


def test_a_client_that_goes_away_frees_its_slot(live_engine):
    body = {"text": "Hi", "sampling_params": {**LONG, "max_new_tokens": 450}}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live_engine.url}/generate", json=body, timeout=0.5)
    assert live_engine.generate(text="Hi", sampling_params={"max_new_tokens": 1})["text"] is not None
    with httpx.Client(base_url=live_engine.url) as client:
        while client.get("/v1/loads").json()["aggregate"]["total_running_reqs"]:
            assert client.get("/health").status_code == 200


def test_pause_abort_ends_what_runs(live_engine, background):
    one = Streamed(live_engine, background, text="Hi", sampling_params={**LONG, "max_new_tokens": 400})
    assert one.started.wait(60)
    assert post(live_engine, "/pause_generation", mode="abort")[0] == 200
    assert one.result()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
def test_a_paused_request_continues_to_its_full_length(live_engine, background, mode, retractions):
    one = Streamed(live_engine, background, text="Hi", sampling_params=LONG, return_logprob=True)
    assert one.started.wait(60)
    assert post(live_engine, "/pause_generation", mode=mode)[0] == 200
    assert live_engine.client.get("/health").status_code == 200
    assert post(live_engine, "/continue_generation")[0] == 200
    reply = one.result()
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
    assert reply["meta_info"]["total_retractions"] == retractions
    assert len(reply["output_ids"]) == len(reply["meta_info"]["output_token_logprobs"]) == 60


def test_an_unknown_pause_mode_is_refused(live_engine):
    status, body = post(live_engine, "/pause_generation", mode="nap")
    assert status == 400
    assert "abort, retract, in_place" in body["error"]["message"]


def test_new_weights_wait_for_running_requests_which_keep_the_old_version(live_engine, background, local_model):
    one = Streamed(live_engine, background, text="Hi", sampling_params=LONG)
    assert one.started.wait(60)
    body = {"model_path": str(local_model.gguf), "weight_version": "step-2"}
    assert post(live_engine, "/update_weights_from_disk", **body) == (
        200,
        {
            "success": True,
            "message": "Succeeded to update model weights. Weight version updated to step-2.",
            "num_paused_requests": 0,
        },
    )
    reply = one.result()
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
    assert reply["meta_info"]["weight_version"] == "default"
    after = live_engine.generate(text="Hi", sampling_params={"max_new_tokens": 1})
    assert after["meta_info"]["weight_version"] == "step-2"
    assert live_engine.client.get("/model_info").json()["weight_version"] == "step-2"


def test_new_weights_can_abort_what_runs(live_engine, background, local_model):
    one = Streamed(live_engine, background, text="Hi", sampling_params={**LONG, "max_new_tokens": 450})
    assert one.started.wait(60)
    body = {"model_path": str(local_model.gguf), "abort_all_requests": True}
    assert post(live_engine, "/update_weights_from_disk", **body)[0] == 200
    assert one.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_paused_request_continues_with_new_weights(live_engine, background, local_model):
    one = Streamed(live_engine, background, text="Hi", sampling_params=LONG)
    assert one.started.wait(60)
    post(live_engine, "/pause_generation", mode="retract")
    body = {"model_path": str(local_model.gguf), "weight_version": "while-paused", "flush_cache": False}
    assert post(live_engine, "/update_weights_from_disk", **body)[0] == 200
    post(live_engine, "/continue_generation")
    meta = one.result()["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 60}
    assert (meta["weight_version_start"], meta["weight_version"]) == ("default", "while-paused")


def test_weights_that_cannot_be_loaded_leave_the_old_ones(live_engine, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    greedy = {"temperature": 0, "max_new_tokens": 5}
    before = live_engine.generate(text="The capital of France is", sampling_params=greedy)
    for path in (str(broken), "/no/such/folder", str(tmp_path.parent)):
        status, body = post(live_engine, "/update_weights_from_disk", model_path=path, weight_version="bad")
        assert (status, body["success"]) == (400, False)
    after = live_engine.generate(text="The capital of France is", sampling_params=greedy)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "default"


REFUSED = {
    "id above the vocabulary": ({"input_ids": [49152]}, r"input_ids[0] is 49152"),
    "negative id": ({"input_ids": [5, -1]}, r"input_ids[1] is -1"),
    "id that is text": ({"input_ids": [5, "6"]}, r"input_ids[1] is '6'"),
    "stop id outside": ({"text": "a", "sampling_params": {"stop_token_ids": [99999]}}, "stop_token_ids[0]"),
    "bias outside": ({"text": "a", "sampling_params": {"logit_bias": {"99999": 1}}}, "logit_bias[0]"),
    "empty text": ({"text": ""}, "The input is empty"),
    "empty ids": ({"input_ids": []}, "the prompt must be"),
    "both prompts": ({"text": "a", "input_ids": [5]}, "give one"),
    "misspelt": ({"text": "a", "sampling_params": {"temprature": 1}}, "did you mean 'temperature'"),
    "start after the end": ({"text": "a", "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len 9"),
    "lists that differ": ({"text": ["a", "b"], "sampling_params": [{}]}, "1 entries for 2 prompts"),
    "rid of numbers": ({"text": "a", "rid": 5}, "rid must be a string"),
}


@pytest.mark.parametrize(("body", "sentence"), REFUSED.values(), ids=REFUSED)
def test_requests_that_could_hurt_the_engine_are_refused(live_engine, body, sentence):
    status, reply = post(live_engine, "/generate", **body)
    assert status == 400
    assert sentence in reply["error"]["message"]


def test_what_is_no_json_object_is_refused(live_engine):
    for content in (b"{", b"[1]", b"\xff"):
        assert live_engine.client.post("/generate", content=content).status_code == 400


def test_more_requests_than_slots_all_get_their_answer(live_engine, background):
    prompts = [[5 + at, 6, 7] for at in range(30)]
    replies = live_engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    assert [reply["meta_info"]["completion_tokens"] for reply in replies] == [5] * 30


def test_what_openai_routes_cannot_honour_is_refused_in_their_shape(live_engine):
    messages = [{"role": "user", "content": "hi"}]
    for body in (
        {"messages": messages, "response_format": {"type": "json_object"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, "you"]}]},
        {"messages": messages, "logprobs": True, "top_logprobs": "all"},
        {"messages": messages, "logprobs": True, "top_logprobs": True},
        {"messages": messages, "max_tokens": 600},
        {"messages": messages, "temperature": -1},
    ):
        status, reply = post(live_engine, "/v1/chat/completions", **body)
        assert (status, reply["object"], reply["type"]) == (400, "error", "BadRequestError")
