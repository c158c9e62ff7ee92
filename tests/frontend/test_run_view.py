import itertools
import json
import threading
import time

import numpy as np
import pytest
import yaml
from fastapi.testclient import TestClient

from atroposlib.data import table
from atroposlib.data.policy import SelectionPolicy, select
from atroposlib.data.table import concatenate, open_table, scan_after, table_of
from atroposlib.frontend import live_rollouts, run_view
from atroposlib.frontend.group_detail import PAGE_TOKENS, TokenTexts, pieces
from atroposlib.frontend.live_rollouts import LiveRollouts
from atroposlib.frontend.query import Query
from atroposlib.frontend.run_view import FileRollouts, make_app
from atroposlib.rollouts.files import compress
from tests.data.rollout_factory import write_groups
from tests.data.small_tokenizer import write_tokenizer

HOSTILE = "<script>alert(1)</script>"


def group(scores, task, tokens=3, item="7", version="1", said="Lyon", **extra):
    rows = [[1, *range(2, tokens + j)] for j in range(len(scores))]
    return {
        "tokens": rows,
        "masks": [[-100, *row[1:]] for row in rows],
        "inference_logprobs": [[1.0, *[-0.5] * (len(row) - 1)] for row in rows],
        "scores": scores,
        "task": task,
        "messages": [
            [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": f"{said} {j}"}]
            for j in range(len(scores))
        ],
        "images": ["data:image/png;base64,AAAA", "http://example.com/x.png"],
        "finish_reasons": ["stop"] * (len(scores) - 1) + ["length"],
        "engine": {"weight_version_end": version},
        "item_key": item,
        **extra,
    }


GROUPS = [
    group([1.0, 0.0], "sums", trainer_logprobs=[[1.0, -0.75], [1.0, -0.5, -1.5]], verdicts=["right", {"why": "no 4"}]),
    group([-1.0], "sorting", tokens=PAGE_TOKENS + 11, item="8"),
    group([0.5, 0.5, 1.0], "sums", version="2", said="Gdańsk"),
    group([0.0], "", item="9", unscored=[{"index": 1, "failure": "verifier", "error": "no verdict", "tokens": [1]}]),
]


def make_client(*paths, texts=None):
    rollouts = FileRollouts()
    rollouts.follow(list(paths))
    return TestClient(make_app(rollouts, texts), base_url="http://localhost")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_groups(tmp_path_factory.mktemp("run") / "a.jsonl", GROUPS)


@pytest.fixture(scope="module")
def client(path):
    return make_client(path)


def lines_of(client, **query):
    return [int(each["at"].removeprefix("a.jsonl:")) for each in groups_of(client, **query)["groups"]]


def groups_of(client, **query):
    """The answer when every search has ended."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = client.get("/api/groups", params=query)
        assert found.status_code == 200, found.text
        if not found.json()["unread"]:
            return found.json()
        time.sleep(0.01)
    raise AssertionError("the search does not end")


def test_a_file_that_becomes_known_while_the_list_is_made_is_in_the_next_list(tmp_path, monkeypatch):
    paths = [write_groups(tmp_path / name, [GROUPS[0]]) for name in ("a.jsonl", "b.jsonl")]
    rollouts = FileRollouts()
    rollouts.add(table_of(paths[0]))

    def concatenate_meanwhile(tables):
        monkeypatch.undo()
        rollouts.add(table_of(paths[1]))
        return concatenate(tables)

    monkeypatch.setattr(live_rollouts, "concatenate", concatenate_meanwhile)
    assert [len(rollouts.table().groups) for _ in range(2)] == [1, 2]


def test_of_a_large_file_the_first_groups_are_shown_while_the_rest_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "_FIRST_LOOK_S", 0.0)
    path = write_groups(tmp_path / "large.jsonl", [group([1, 0], "sums", item=str(number)) for number in range(200)])
    rollouts, counts, add = FileRollouts(), [], FileRollouts.add

    def add_and_look(known):
        add(rollouts, known)
        counts.append(groups_of(TestClient(make_app(rollouts), base_url="http://localhost"))["groups_total"])

    monkeypatch.setattr(rollouts, "add", add_and_look)
    rollouts.follow([path])
    assert (counts[0], counts[-1]) == (1, 200)
    assert counts == sorted(counts)
    assert rollouts.table().groups.tobytes() == scan_after(path, None).groups.tobytes()


def test_a_page_whose_name_was_made_to_resolve_to_this_machine_reads_nothing(client):
    answer = client.get("/api/groups", headers={"Host": "evil.example"})
    assert answer.status_code == 403
    assert "evil.example" in answer.text
    assert client.get("/api/groups", headers={"Host": "127.0.0.1:9000"}).status_code == 200


FILTERS = {
    "all": ({}, [1, 2, 3, 4]),
    "task": ({"task": "sorting"}, [2]),
    "unknown task": ({"task": "none"}, []),
    "score from": ({"min_score": 0.75}, [1, 3]),
    "score to": ({"max_score": -0.5}, [2]),
    "tokens from": ({"min_tokens": 10}, [2]),
    "tokens to": ({"max_tokens": 1}, [1, 3, 4]),
    "reason": ({"finish": "stop"}, [1, 3]),
    "failure class": ({"failed": "verifier"}, [4]),
    "step": ({"weights": "2"}, [3]),
    "run": ({"run": "a"}, [1, 2, 3, 4]),
    "no run": ({"run": "b"}, []),
    "pass rate of the item in all its groups": ({"min_rate": 0.8, "max_rate": 0.9}, [1, 3]),
    "gap": ({"min_gap": 0.4}, [1]),
    "text of an answer, in any case": ({"text": "gDAŃsk 2"}, [3]),
    "text of a prompt": ({"text": "alert(1)"}, [1, 2, 3, 4]),
    "text that is in none": ({"text": "Bonn"}, []),
    "two filters": ({"task": "sums", "text": "lyon"}, [1]),
    "best score first": ({"sort": "-score"}, [3, 1, 4, 2]),
    "longest first": ({"sort": "-tokens"}, [2, 3, 1, 4]),
    "widest spread first": ({"sort": "-spread"}, [1, 3, 2, 4]),
    "hardest first": ({"sort": "rate"}, [2, 4, 1, 3]),
    "by task": ({"sort": "task"}, [4, 2, 1, 3]),
    "largest gap first": ({"sort": "gap"}, [1, 2, 3, 4]),
}


@pytest.mark.parametrize(("query", "lines"), FILTERS.values(), ids=FILTERS)
def test_groups_are_filtered_and_sorted(client, query, lines):
    found = groups_of(client, **query)
    if query.get("sort") == "gap":  # read by a thread
        groups_of(client, min_gap=0)
    assert lines_of(client, **query) == lines
    assert (found["matching"], found["groups_total"]) == (len(lines), 4)


@pytest.mark.parametrize("query", [{"colour": "red"}, {"min_score": "high"}, {"sort": "size"}])
def test_a_filter_that_is_none_is_refused_by_name(client, query):
    answer = client.get("/api/groups", params=query)
    assert answer.status_code == 422
    assert next(iter(query)) in answer.json()["detail"]


def test_what_can_be_chosen_is_listed(client):
    assert client.get("/api/groups").json()["facets"] == {
        "task": ["", "sorting", "sums"],
        "run": ["a"],
        "weights": ["1", "2"],
        "finish": ["stop", "length"],
        "failed": ["verifier"],
    }


def test_a_page_of_the_list_is_found_by_an_offset_or_by_a_group_that_it_holds(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [group([1.0], "t", item=str(item)) for item in range(120)])
    client = make_client(path)
    for place in ({"offset": 50}, {"around": "a.jsonl:77"}):
        found = client.get("/api/groups", params=place).json()
        assert (found["offset"], found["groups"][0]["at"], len(found["groups"])) == (50, "a.jsonl:51", 50)


def test_a_group_is_its_prompt_once_and_each_answer_with_what_was_said_of_it(client):
    detail = client.get("/api/group", params={"at": "a.jsonl:1"}).json()
    assert detail["prompt"] == [{"role": "user", "content": HOSTILE}]
    first, second = detail["responses"]
    assert first["messages"] == [{"role": "assistant", "content": "Lyon 0"}]
    assert (first["facts"], second["facts"]) == ({"verdicts": "right"}, {"verdicts": {"why": "no 4"}})
    assert (first["score"], second["finish"], second["completion"]) == (1.0, "length", 2)
    assert (first["side"], second["side"]) == ("chosen", "rejected")
    assert detail["channels"] == ["inference_logprobs", "trainer_logprobs"]
    assert detail["about"]["item_key"] == "7"
    assert "tokens" not in detail["about"]
    assert detail["images"] == ["data:image/png;base64,AAAA"]


def test_responses_that_failed_are_shown_with_their_reason(client):
    failed = client.get("/api/group", params={"at": "a.jsonl:4"}).json()["unscored"]
    assert failed == [{"index": 1, "failure": "verifier", "error": "no verdict"}]


def test_of_long_responses_a_page_of_tokens_is_sent_at_a_time(client):
    start = PAGE_TOKENS
    tokens = client.get("/api/tokens", params={"at": "a.jsonl:2", "start": start}).json()
    assert (tokens["total"], len(tokens["ids"]), tokens["ids"][0]) == (PAGE_TOKENS + 10, 10, PAGE_TOKENS + 1)
    assert tokens["channels"]["inference_logprobs"] == [-0.5] * 10
    assert tokens["trained"] == [True] * 10


@pytest.mark.parametrize("at", ["a.jsonl:9", "b.jsonl:1", "a.jsonl", "a.jsonl:-1", "", "a.jsonl:" + "9" * 40])
def test_an_unknown_group_is_404(client, at):
    assert client.get("/api/group", params={"at": at}).status_code == 404


def test_the_tokenizer_is_that_of_the_run_and_is_loaded_while_ids_are_shown(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.config.yaml").write_text(f"env: {{tokenizer_name: {tokenizer}}}\n")
    client = make_client(write_groups(tmp_path / "a.jsonl", [group([1.0], "t", tokens=20)]))
    for _ in range(200):
        tokens = client.get("/api/tokens", params={"at": "a.jsonl:1"}).json()
        assert tokens["tokenizer"] == str(tokenizer)
        if tokens["texts"]:
            break
        assert tokens["reason"] == "loading"
        time.sleep(0.01)
    assert tokens["texts"][:2] == ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("spec", [None, "/nowhere/tokenizer"])
def test_without_a_tokenizer_ids_are_shown_with_the_reason(path, spec):
    client = make_client(path, texts=TokenTexts(spec))
    for _ in range(500):
        tokens = client.get("/api/tokens", params={"at": "a.jsonl:1"}).json()
        if tokens["reason"] != "loading":
            break
        time.sleep(0.02)
    assert tokens["texts"] is None
    assert (spec or "--tokenizer") in tokens["reason"]


def test_a_character_of_several_tokens_stands_with_the_last_of_them():
    def decode(ids):
        return bytes(ids).decode(errors="replace")

    assert pieces(decode, list("aü€".encode())) == ["a", "", "ü", "", "", "€"]
    assert pieces(decode, [0xE2, 0x61]) == ["", "\ufffda"]


def test_histograms_are_filters(client):
    numbers = client.get("/api/numbers").json()
    for name in ("score", "tokens", "gap"):
        for bar in numbers[name]["bars"]:
            found = groups_of(client, **{f"min_{name}": bar["from"], f"max_{name}": bar["to"]})
            assert found["matching_responses"] == bar["count"], (name, bar)
    assert numbers["tasks"][0] == {"task": "sums", "scored": 5, "accepted": 4, "unscored": 0}


def test_a_response_without_a_score_is_neither_a_failure_nor_a_success(tmp_path):
    client = make_client(
        write_groups(tmp_path / "a.jsonl", [group([1, None, 0, None], "sums"), group([None], "none", item="8")])
    )
    assert client.get("/api/numbers").json()["tasks"] == [
        {"task": "sums", "scored": 2, "accepted": 1, "unscored": 2},
        {"task": "none", "scored": 0, "accepted": 0, "unscored": 1},
    ]
    assert [lines_of(client, max_rate=high) for high in (0.4, 0.5)] == [[], [1]]


def test_the_page_brings_the_answers_to_its_first_questions(client, path):
    page = client.get("/").text
    held = json.loads(page.partition('id="answers">')[2].partition("</script>")[0])
    assert held == {question: client.get(question).json() for question in held}
    assert [question.partition("?")[0] for question in held] == ["/api/groups", "/api/group"]


def test_a_dataset_is_said_to_be_no_rollouts(tmp_path, path):
    (tmp_path / "sft.jsonl").write_text('{"prompt": [], "completion": []}\n')
    rollouts = FileRollouts()
    rollouts.follow([tmp_path / "sft.jsonl"])
    assert rollouts.state() == "no line of sft.jsonl is a group of responses; give view-run rollout files"
    rollouts.follow([tmp_path / "sft.jsonl", path])
    assert rollouts.state() == ""


def test_numbers_and_an_order_by_gap_say_how_many_groups_are_still_to_be_read(path, monkeypatch):
    may_read, read, calls = threading.Event(), FileRollouts.read, itertools.count()

    def read_later(self, *args, **kinds):
        if next(calls) > 0:  # the first one looks at the beginning
            may_read.wait(60)
        yield from read(self, *args, **kinds)

    monkeypatch.setattr(FileRollouts, "read", read_later)
    monkeypatch.setattr(run_view, "_FIRST_WAIT_S", 0)
    client = make_client(path)
    numbers = client.get("/api/numbers").json()
    assert (numbers["unread"], numbers["gap"]["bars"]) == (len(GROUPS), [])
    assert client.get("/api/groups", params={"sort": "gap"}).json()["unread"] == len(GROUPS)
    may_read.set()
    assert groups_of(client, sort="gap")["unread"] == 0
    numbers = client.get("/api/numbers").json()
    assert (numbers["unread"], sum(bar["count"] for bar in numbers["gap"]["bars"])) == (0, 2)


def test_wide_ranges_are_put_into_bars_whose_limits_are_exact(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [group([score / 7], "t", item=str(score)) for score in range(-40, 60)])
    client = make_client(path)
    bars = client.get("/api/numbers").json()["score"]["bars"]
    assert (len(bars), sum(bar["count"] for bar in bars)) == (20, 100)
    for bar in bars[:3]:
        assert groups_of(client, min_score=bar["from"], max_score=bar["to"])["matching"] == bar["count"]


EXPORTS = [
    {},
    {"task": "sums", "min_score": 0.5},
    {"weights": "2"},
    {"text": "lyon", "finish": "length"},
    {"min_rate": 0.5, "max_tokens": 2},
]


@pytest.mark.parametrize("query", EXPORTS, ids=str)
def test_policy_and_lines_hold_what_was_filtered(client, path, tmp_path, query):
    wanted = groups_of(client, **query)["matching_responses"]
    policy = SelectionPolicy.model_validate(yaml.safe_load(client.get("/api/policy.yaml", params=query).text))
    assert int(select(open_table(path), policy).keep.sum()) == wanted
    target = tmp_path / "out.jsonl"
    target.write_bytes(client.get("/api/rollouts.jsonl", params=query).content)
    assert len(open_table(target).responses) == wanted


def test_a_line_of_which_some_responses_are_exported_is_a_whole_group_of_them(client):
    (line,) = client.get("/api/rollouts.jsonl", params={"task": "sums", "max_score": 0.0}).text.splitlines()
    record = json.loads(line)
    assert (record["scores"], record["verdicts"], record["group_overrides"]) == (
        [0.0],
        [{"why": "no 4"}],
        {"group_size": 1},
    )
    assert record["tokens"] == [GROUPS[0]["tokens"][1]]


def test_what_no_policy_can_say_is_refused_with_what_to_do():
    with pytest.raises(run_view.ConfigError, match="export JSONL"):
        Query(failed="verifier").policy()


def test_two_runs_are_compared_item_by_item(tmp_path):
    paths = []
    for name, scores in (("a", [(0.0, 0.0), (1.0, 1.0), (0.5, 0.5)]), ("b", [(1.0, 0.0), (0.0, 0.0), (0.5, 0.5)])):
        (tmp_path / name).mkdir()
        groups = [group(list(pair), "t", item=str(item)) for item, pair in enumerate(scores)]
        groups.append(group([1.0], "t", item=name))
        paths.append(write_groups(tmp_path / name / "x_rollouts_main_0001.jsonl", groups))
    client = make_client(*paths)
    runs = client.get("/api/groups").json()["facets"]["run"]
    assert runs == ["a/x_rollouts_main", "b/x_rollouts_main"]
    found = client.get("/api/compare", params={"left": f"run:{runs[0]}", "right": f"run:{runs[1]}"}).json()
    assert (found["wins"], found["ties"], found["only"]) == ([1, 1], 1, [1, 1])
    assert found["items"][0]["scores"] == [1.0, 0.0]
    assert found["items"][0]["groups"] == [f"{name}/x_rollouts_main_0001.jsonl:2" for name in "ab"]


def test_two_runs_without_an_item_in_common_have_a_mean_each(tmp_path):
    paths = []
    for name, scores in (("a", [(1.0, 0.0), (1.0, 1.0)]), ("b", [(0.0, 0.5)])):
        (tmp_path / name).mkdir()
        groups = [group(list(pair), "t", item=f"{name}{at}") for at, pair in enumerate(scores)]
        paths.append(write_groups(tmp_path / name / "x_rollouts_main_0001.jsonl", groups))
    client = make_client(*paths)
    sides = {"left": "run:a/x_rollouts_main", "right": "run:b/x_rollouts_main"}
    found = client.get("/api/compare", params=sides).json()
    assert (found["matching"], found["mean"], found["own"], found["only"]) == (0, [None, None], [0.75, 0.25], [2, 1])
    found = client.get("/api/compare", params={**sides, "min_score": "2"}).json()
    assert (found["own"], found["only"]) == ([None, None], [0, 0])


def test_two_steps_are_compared_and_an_unknown_side_is_named(client):
    found = client.get("/api/compare", params={"left": "step:1", "right": "step:2"}).json()
    assert [each["scores"] for each in found["items"]] == [[0.5, pytest.approx(2 / 3)]]
    answer = client.get("/api/compare", params={"left": "step:9", "right": "step:2"})
    assert answer.status_code == 400
    assert "step:1" in answer.json()["detail"]


def test_failures_come_newest_first_with_their_tracebacks(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [GROUPS[0]])
    failures = [{"class": kind, "at": at, "traceback": f"T{at}"} for at, kind in enumerate(("kill", "engine", "kill"))]
    (tmp_path / "failures.jsonl").write_text("".join(json.dumps(each) + "\n" for each in failures) + '{"torn')
    client = make_client(path)
    found = client.get("/api/failures").json()
    assert found["counts"] == {"engine": 1, "kill": 2}
    assert [each["traceback"] for each in found["failures"]] == ["T2", "T1", "T0"]
    assert len(client.get("/api/failures", params={"kind": "engine"}).json()["failures"]) == 1


def test_a_run_that_continues_is_followed_and_addresses_and_searches_stay(tmp_path):
    paths = [write_groups(tmp_path / name, [group([1.0], "t", item=name)]) for name in ("a.jsonl", "b.jsonl")]
    rollouts = FileRollouts()
    rollouts.follow(paths)
    client = TestClient(make_app(rollouts), base_url="http://localhost")
    assert groups_of(client, text="lyon")["matching"] == 2
    with paths[0].open("a") as stream:
        stream.write(json.dumps(group([0.0], "t", item="late")) + "\n")
    rollouts.follow(paths)
    assert [each["at"] for each in groups_of(client, text="lyon")["groups"]] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]
    assert client.get("/api/group", params={"at": "b.jsonl:1"}).json()["about"]["item_key"] == "b.jsonl"
    paths[1].unlink()
    rollouts.follow(paths[:1])
    assert groups_of(client)["groups_total"] == 2


def test_a_file_that_took_the_place_of_another_is_searched_again(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [group([1.0, 0.0, 0.5], "t", item=str(item)) for item in range(2)])
    rollouts = FileRollouts()
    rollouts.follow([path])
    client = TestClient(make_app(rollouts), base_url="http://localhost")
    assert groups_of(client, text="lyon")["matching"] == 2
    path.unlink()
    write_groups(path, [group([1.0], "t", item="2", said="Gdańsk")])
    rollouts.follow([path])
    assert (groups_of(client, text="lyon")["matching"], groups_of(client, text="gdańsk")["matching"]) == (0, 1)


def test_groups_of_a_running_api_are_searched_and_shown_too():
    live = LiveRollouts("http://user:pass@localhost:8000", batch_size=8, max_token_len=64)
    live.add([GROUPS[0], GROUPS[0], GROUPS[2]])
    client = TestClient(make_app(live), base_url="http://localhost")
    (found,) = groups_of(client, text="gdańsk")["groups"]
    assert found["at"] == "localhost:8000:2"
    assert len(client.get("/api/group", params={"at": found["at"]}).json()["responses"]) == 3
    assert client.get("/api/tokens", params={"at": found["at"]}).json()["texts"] is None


def test_of_a_running_api_the_newest_groups_are_kept(monkeypatch):
    monkeypatch.setattr(live_rollouts, "KEPT_GROUPS", 3)
    live = LiveRollouts("http://localhost:8000", batch_size=8, max_token_len=64)
    live.add([group([1.0], "sums", item=str(number)) for number in range(4)])
    client = TestClient(make_app(live), base_url="http://localhost")
    places = [f"localhost:8000:{number}" for number in (2, 3, 4)]
    assert [each["at"] for each in groups_of(client, text="lyon")["groups"]] == places
    assert client.get("/api/group", params={"at": places[0]}).json()["about"]["item_key"] == "1"
    table = live.table()
    live.add([group([1.0], "sums", item="4")])
    with pytest.raises(run_view.AtroposError, match="newer ones have come"):
        live.group(table, 0)
    assert [line.number for _, line, _ in live.read(table, np.arange(3))] == [3, 4]
    assert groups_of(client, text="lyon")["matching"] == 3


def test_a_group_is_that_of_the_table_that_named_it_though_a_file_before_it_grew(tmp_path):
    paths = [write_groups(tmp_path / name, [group([1.0], "t", item=name)]) for name in ("a.jsonl", "b.jsonl")]
    rollouts = FileRollouts()
    rollouts.follow(paths)
    before = rollouts.table()
    with paths[0].open("a") as stream:
        stream.write(json.dumps(group([0.0], "t", item="late")) + "\n")
    rollouts.follow(paths)
    assert json.loads(rollouts.group(before, 1))["item_key"] == "b.jsonl"


def test_groups_are_found_when_a_running_job_has_compressed_their_file(tmp_path):
    paths = [write_groups(tmp_path / name, [group([1.0], "t", item=name)]) for name in ("a.jsonl", "b.jsonl")]
    rollouts = FileRollouts()
    rollouts.follow(paths)
    client = TestClient(make_app(rollouts), base_url="http://localhost")
    assert [each["at"] for each in groups_of(client)["groups"]] == ["a.jsonl:1", "b.jsonl:1"]
    rollouts.follow([compress(paths[0]), paths[1]])
    places = [each["at"] for each in groups_of(client)["groups"]]
    found = [client.get("/api/group", params={"at": place}).json()["about"]["item_key"] for place in places]
    assert list(zip(places, found, strict=True)) == [("a.jsonl.zst:1", "a.jsonl"), ("b.jsonl:1", "b.jsonl")]
    assert client.get("/api/group", params={"at": "a.jsonl:1"}).json()["at"] == "a.jsonl.zst:1"  # from a bookmark


def test_a_group_whose_ids_and_settings_are_of_other_kinds_is_shown_and_exported(tmp_path):
    odd = {**group([1.0, 0.0], "t"), "tokens": [1, 2], "group_overrides": ["x"]}
    client = make_client(write_groups(tmp_path / "a.jsonl", [odd]))
    assert [each["tokens"] for each in client.get("/api/group?at=a.jsonl:1").json()["responses"]] == [0, 0]
    line = client.get("/api/rollouts.jsonl", params={"min_score": 0.5}).json()
    assert (line["scores"], line["group_overrides"]) == ([1.0], {"group_size": 1})
    assert client.get("/").status_code == 200


def test_a_group_of_which_no_response_has_a_finite_score_is_shown(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"scores": [Infinity, NaN], "tokens": [[1], [1]], "masks": [[1], [1]], "messages": ["a", "b"]}\n')
    assert [each["side"] for each in make_client(path).get("/api/group?at=a.jsonl:1").json()["responses"]] == [None] * 2


@pytest.mark.parametrize("rows", [[["a", "b"], None], [[1.0, {"a": 1}], [1.0, 2.0, 3.0]], [5, 6]])
def test_no_gap_is_measured_of_what_are_no_numbers(tmp_path, rows):
    client = make_client(write_groups(tmp_path / "a.jsonl", [group([1.0, 0.0], "t", trainer_logprobs=rows)]))
    assert groups_of(client, sort="gap")["matching"] == 1


@pytest.mark.parametrize("damaged", [[0], [1], [0, 1, 2]])
def test_damaged_groups_have_no_gap_and_the_others_have(tmp_path, damaged):
    groups = [group([1.0], "t", item=str(item), trainer_logprobs=[[1.0, -0.75]]) for item in range(3)]
    lines = [json.dumps(each) for each in groups]
    for place in damaged:
        lines[place] = lines[place].replace('"tokens": [[1, 2', '"tokens": [[1, ' + "9" * 6000)
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    client = make_client(tmp_path / "a.jsonl")
    assert groups_of(client, min_gap=0.1)["matching"] == 3 - len(damaged)
    bars = client.get("/api/numbers").json()["gap"]
    assert sum(bar["count"] for bar in bars["bars"]) == 2 if len(damaged) == 1 else bars is None
    assert groups_of(client, sort="gap")["groups_total"] == 3


def test_a_limit_beyond_all_numbers_is_refused(client):
    assert client.get("/api/groups", params={"min_tokens": "9" * 400}).status_code == 422


def test_every_answer_forbids_all_scripts_but_the_pages_own(client):
    for place in ("/", "/viewer/main.js", "/api/groups", "/nowhere"):
        headers = client.get(place).headers
        assert "default-src 'none'; script-src 'self'; style-src 'self';" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert "require-trusted-types-for 'script'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_pages_modules_never_set_markup_and_nothing_else_is_served(client):
    for path in run_view._VIEWER.glob("*.js"):
        script = client.get(f"/viewer/{path.name}").text
        for markup in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "setHTML", "srcdoc"):
            assert markup not in script, path
    for name in ("..%2frun_view.py", "../run_view.py", "none.js"):
        assert client.get(f"/viewer/{name}").status_code == 404
