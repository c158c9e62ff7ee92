import json

from typer.testing import CliRunner

from atroposlib.cli.data import app


def test_a_task_named_like_markup_is_shown_as_it_is(tmp_path):
    group = {"item_key": "0", "part": 0, "parts": 1, "task": "[/INST]", "scores": [1.0], "group_id": "g"}
    sequence = {"tokens": [[1, 2]], "masks": [[-100, 2]], "inference_logprobs": [[1.0, -0.5]]}
    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({**group, **sequence, "messages": messages}) + "\n")
    done = CliRunner().invoke(app, ["stats", str(path)])
    assert done.exit_code == 0, done.exception
    assert "[/INST]" in done.stdout
