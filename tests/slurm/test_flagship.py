"""The seed's command with nothing else set: it collects InternBootcamp, and its data lie where they were."""

import json

import pytest

from atroposlib.launch.services import free_ports
from tests.slurm.conftest import PROBLEMS, RESPONSES, SlurmRun


@pytest.mark.short
def test_the_job_collects_the_checkout_and_leaves_data_and_logs_where_upstreams_job_did(run: SlurmRun):
    port = str(free_ports(1)[0])
    job = run.submit(API_PORT=port, STAND_IN_SECONDS="0.1")
    run.wait(job, "COMPLETED", "FAILED")
    assert run.states(job) == ["COMPLETED"], run.output(job)
    run.assert_exact()

    shards = sorted((run.folder / "atropos" / "data").glob("intern_bootcamp_rollouts_*.jsonl"))
    lines = [json.loads(line) for shard in shards for line in shard.read_text().splitlines()]
    assert len(lines) == PROBLEMS
    assert {line["task"] for line in lines} == {"Evenbootcamp", "Primebootcamp"}
    assert 0 < len((run.data / "sft.jsonl").read_text().splitlines()) < PROBLEMS * RESPONSES

    said = (run.folder / "logs" / f"{job}.out").read_text()
    assert f"mixture: 2 tasks of {run.folder}/InternBootcamp: Evenbootcamp 50.0%, Primebootcamp 50.0%" in said
    assert f"1 task in quarantine ({run.folder}/quarantine.json):" in said
    assert said.count(", asks: Is ") == 3
    assert f"http://127.0.0.1:{port}" in (run.folder / "logs" / job / "api.log").read_text()


def test_without_a_checkout_the_job_fails_at_once_and_says_how_to_get_one(run: SlurmRun):
    job = run.submit(INTERNBOOTCAMP=str(run.folder / "nowhere"))
    run.wait(job, "FAILED", "COMPLETED")
    assert "is not a checkout of InternBootcamp" in run.output(job)
    assert "git clone https://github.com/InternLM/InternBootcamp ~/InternBootcamp" in run.output(job)
    assert not (run.data / "rollouts").exists()


def test_a_run_whose_dataset_is_empty_fails_so_that_afterok_does_not_train(run: SlurmRun):
    job = run.submit(arguments=("--set", "export=[{path: sft.jsonl, above_score: 9}]"), STAND_IN_SECONDS="0.1")
    run.wait(job, "FAILED", "COMPLETED")
    assert run.states(job) == ["FAILED"]
    assert "the run is complete, but sft.jsonl would be empty" in run.output(job)
    again = run.submit()
    run.wait(again, "COMPLETED")
    run.assert_exact()
