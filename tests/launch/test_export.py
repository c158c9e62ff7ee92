"""The datasets at the end of a run, from rollout files as its members leave them."""

import json
from pathlib import Path

from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.export import export_all
from atroposlib.launch.model_checks import Model


def test_a_member_that_recorded_nothing_does_not_stop_the_export_of_the_others(tmp_path):
    busy, idle = (tmp_path / "members" / name / "rollouts" for name in ("task0", "task1"))
    for folder in (busy, idle):
        folder.mkdir(parents=True)
    (idle / "failures.jsonl").write_text("{}\n")
    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    group = {"item_key": "0", "scores": [1.0], "messages": messages, "tokens": [[1, 2]], "masks": [[-100, 2]]}
    (busy / "env_rollouts_r_0001.jsonl").write_text(json.dumps({**group, "inference_logprobs": [[1.0, -0.5]]}) + "\n")
    values = {"name": "r", "run_dir": str(tmp_path), "problems": 1, "responses": 1, "share": {"member": "task0"}}
    config = DatagenConfig.model_validate({**values, "environment": {"script": "env.py"}})
    assert export_all(config, Model("m", "m", "m", "m")) == [Path(tmp_path, "sft.jsonl")]
    assert len((tmp_path / "sft.jsonl").read_text().splitlines()) == 1
