import json

import pytest
from fastapi.testclient import TestClient

from atroposlib.data.table import concatenate, table_of
from atroposlib.frontend import run_view
from atroposlib.frontend.run_view import MAX_TOKENS, FileRollouts, make_app

HOSTILE = "<script>alert(1)</script>"


def group(scores, task, tokens=3):
    rows = [[1, *range(2, tokens + j)] for j in range(len(scores))]
    return {
        "tokens": rows,
        "masks": [[-100, *row[1:]] for row in rows],
        "inference_logprobs": [[1.0, *[-0.5] * (len(row) - 1)] for row in rows],
        "scores": scores,
        "task": task,
        "messages": [[{"role": "user", "content": HOSTILE}] for _ in scores],
        "images": ["data:image/png;base64,AAAA", "http://example.com/x.png"],
        "item_key": "7",
    }


@pytest.fixture
def client(tmp_path):
    path = tmp_path / "a.jsonl"
    groups = [group([1.0, 0.0], "sums"), group([-1.0], "sorting", tokens=MAX_TOKENS + 11)]
    path.write_text("".join(json.dumps(each) + "\n" for each in groups))
    rollouts = FileRollouts()
    rollouts.add(table_of(path))
    return TestClient(
        make_app(rollouts, decode=lambda ids: [f"t{token}" for token in ids]), base_url="http://localhost"
    )


def test_a_file_that_becomes_known_while_the_list_is_made_is_in_the_next_list(tmp_path, monkeypatch):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_text(json.dumps(group([1.0], "sums")) + "\n")
    rollouts = FileRollouts()
    rollouts.add(table_of(paths[0]))

    def concatenate_meanwhile(tables):
        monkeypatch.undo()
        rollouts.add(table_of(paths[1]))
        return concatenate(tables)

    monkeypatch.setattr(run_view, "concatenate", concatenate_meanwhile)
    assert [len(rollouts.table().groups) for _ in range(2)] == [1, 2]


def test_a_page_whose_name_was_made_to_resolve_to_this_machine_reads_nothing(client):
    answer = client.get("/api/groups", headers={"Host": "evil.example"})
    assert answer.status_code == 403
    assert "evil.example" in answer.text
    assert client.get("/api/groups", headers={"Host": "127.0.0.1:9000"}).status_code == 200


FILTERS = {
    "all": ({}, [0, 1]),
    "task": ({"task": "sorting"}, [1]),
    "unknown task": ({"task": "none"}, []),
    "score from": ({"min_score": 0.5}, [0]),
    "score to": ({"max_score": -0.5}, [1]),
    "tokens from": ({"min_tokens": 10}, [1]),
    "tokens to": ({"max_tokens": 10}, [0]),
}


@pytest.mark.parametrize(("query", "rows"), FILTERS.values(), ids=FILTERS)
def test_groups_are_filtered(client, query, rows):
    found = client.get("/api/groups", params=query).json()
    assert [each["row"] for each in found["groups"]] == rows
    assert found["matching"] == len(rows)
    assert found["groups_total"] == 2


def test_a_group_is_shown_with_tokens_masks_and_logprobs(client):
    detail = client.get("/api/group/0").json()
    tokens = detail["responses"][0]["tokens"]
    assert tokens["texts"] == ["t1", "t2"]
    assert tokens["trained"] == [False, True]
    assert tokens["logprobs"] == [1.0, -0.5]
    assert detail["about"] == {"task": "sums", "item_key": "7"}
    assert detail["images"] == ["data:image/png;base64,AAAA"]


def test_of_long_responses_only_the_first_tokens_are_sent(client):
    tokens = client.get("/api/group/1").json()["responses"][0]["tokens"]
    assert len(tokens["texts"]) == MAX_TOKENS
    assert tokens["left_out"] == 10


def test_an_unknown_group_is_404(client):
    assert client.get("/api/group/9").status_code == 404


def test_the_page_runs_only_its_own_script_and_never_sets_markup(client):
    page = client.get("/")
    assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    script = client.get("/view_run.js").text
    assert "textContent" in script
    for markup in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"):
        assert markup not in script
    assert client.get("/view_run.css").status_code == 200
