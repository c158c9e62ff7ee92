"""slurm/intern_bootcamp_datagen.slurm on a real SLURM, with a stand-in for SGLang: nothing breaks the chain of jobs."""

import os
import signal

import pytest

from tests.slurm.conftest import PROBLEMS, RESPONSES, SlurmRun

SERVICES = ("engine", "api", "fake_trainer", "environment")


@pytest.mark.short
def test_a_job_requeued_midway_continues_and_a_finished_run_ends_the_chain(run: SlurmRun):
    job = run.submit(arguments=("--fresh",))  # of the first start alone
    run.wait_groups(4)
    before = {group["group_id"] for group in run.groups()}
    run.slurm("scontrol", "requeue", job)
    run.wait(job, "COMPLETED")
    run.assert_exact()
    assert before <= {group["group_id"] for group in run.groups()}
    assert run.job(job)["Restarts"] == "1"
    logs = {path.name for path in (run.folder / "logs" / job).iterdir()}
    assert logs == {"api.log", "sglang.log", "intern_bootcamp.log", "fake_trainer.log"}
    run.wait_services_gone()

    again = run.submit()
    run.wait(again, "COMPLETED")
    run.assert_exact()
    assert f"done, {PROBLEMS}/{PROBLEMS} problems" in run.output(again)


@pytest.mark.short
def test_usr1_requeues_the_job_and_scancel_ends_it_for_good(run: SlurmRun):
    job = run.submit()
    run.wait_groups(3)
    run.slurm("scancel", "--batch", "--signal=USR1", job)
    run.until(lambda: run.job(job)["Restarts"] == "1", lambda: run.output(job))
    run.wait(job, "RUNNING")
    kept = {group["group_id"] for group in run.groups()}
    run.wait_groups(len(kept) + 3)
    run.slurm("scancel", job)
    run.wait(job, "CANCELLED")
    run.wait_services_gone()
    assert run.job(job)["Restarts"] == "1"
    assert len(run.groups()) < PROBLEMS
    assert kept <= {group["group_id"] for group in run.groups()}

    last = run.submit()
    run.wait(last, "COMPLETED")
    run.assert_exact()


@pytest.mark.short
def test_three_array_tasks_share_the_run_and_repeat_nothing(run: SlurmRun):
    settings = ("share.problems_per_lease=2", "export=[{path: all.jsonl, above_score: -10}]")
    changes = tuple(word for setting in settings for word in ("--set", setting))
    job = run.submit("--array=0-2", "--gpus-per-node=2", arguments=changes, TP="2")
    run.wait(job, "COMPLETED")
    run.assert_exact()
    assert len((run.data / "all.jsonl").read_text().splitlines()) == PROBLEMS * RESPONSES
    assert set(run.generated().values()) == {RESPONSES}
    assert len(run.generated()) == PROBLEMS
    assert len(list(run.data.glob("members/*/rollouts"))) == 3


def test_usr1_queues_only_its_own_array_task_again(run: SlurmRun):
    job = run.submit("--array=0-1", "--gpus-per-node=4", arguments=("--set", "share.problems_per_lease=2"), TP="4")
    run.wait_groups(4)
    for task in (0, 1):
        if run.job(f"{job}_{task}")["JobId"] == job:  # the number of the whole array
            run.slurm("scancel", "--batch", "--signal=USR1", f"{job}_{task}")
            run.until(lambda task=task: run.job(f"{job}_{task}")["Restarts"] == "1", lambda: run.output(job))
    run.wait(job, "COMPLETED")
    run.assert_exact()
    assert sorted(run.job(f"{job}_{task}")["Restarts"] for task in (0, 1)) == ["0", "1"]


def test_scancel_wins_over_a_usr1_that_came_just_before(run: SlurmRun):
    job = run.submit()
    run.wait_groups(3)
    run.slurm("bash", "-c", f"scancel --batch --signal=USR1 {job}; scancel {job}")
    run.wait(job, "CANCELLED")
    run.wait_services_gone()
    run.slurm("sleep", "10")  # longer than a requeued job waits for its next start
    assert run.states(job) == ["CANCELLED"]


def test_a_killed_array_task_holds_nobody_up(run: SlurmRun):
    lease = ("--set", "share.timeout_s=6", "--set", "share.problems_per_lease=2")
    job = run.submit("--array=0-2", "--gpus-per-node=2", arguments=lease, TP="2")
    run.wait_groups(4)
    os.kill(run.record("members/task1")["pid"], signal.SIGKILL)
    run.wait(job, "COMPLETED", "FAILED")
    run.assert_exact()
    assert sorted(run.states(job)) == ["COMPLETED", "COMPLETED", "FAILED"]


@pytest.mark.parametrize("seconds", ["0", "1.5"])
def test_usr1_while_the_job_starts_does_not_break_the_chain(run: SlurmRun, seconds):
    job = run.submit(STAND_IN_LOAD_S="6")
    run.wait(job, "RUNNING")
    run.slurm("sleep", seconds)
    run.slurm("scancel", "--batch", "--signal=USR1", job)
    run.until(lambda: run.job(job)["Restarts"] == "1", lambda: run.output(job))
    run.wait(job, "COMPLETED")
    run.assert_exact()


def test_a_time_limit_chains_the_job(run: SlurmRun):
    job = run.submit("--time=2", "--signal=B:USR1@15", STAND_IN_SECONDS="10")  # which SLURM may send 60 s earlier
    run.until(lambda: int(run.job(job)["Restarts"]) >= 1, lambda: run.output(job))
    assert "stopped by SIGUSR1" in run.output(job)
    run.wait(job, "COMPLETED")
    run.assert_exact()


def test_a_time_limit_whose_warning_was_lost_chains_the_job_too(run: SlurmRun):
    job = run.submit("--time=1", "--signal=B:CONT@1", STAND_IN_SECONDS="8")
    run.until(lambda: "DUE TO TIME LIMIT" in run.output(job), lambda: run.output(job))
    run.until(lambda: run.record()["state"] == "done", lambda: run.output(job))
    run.assert_exact()
    assert run.record()["starts"] >= 2


def test_every_service_may_be_killed(run: SlurmRun):
    job = run.submit()
    for count, name in enumerate(SERVICES):
        run.wait_groups(2 + 3 * count)
        os.kill(run.pid_of(name), signal.SIGKILL)
        run.until(lambda name=name: run.restarts()[name] == 1, lambda: run.output(job))
    run.wait(job, "COMPLETED")
    run.assert_exact()
    assert run.job(job)["Restarts"] == "0"


def test_a_failed_node_requeues_the_job(run: SlurmRun):
    job = run.submit()
    run.wait_groups(3)
    node = run.job(job)["BatchHost"]
    run.slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    run.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
    run.wait(job, "COMPLETED")
    run.assert_exact()
    assert run.job(job)["Restarts"] == "1"


def test_a_killed_supervisor_fails_the_job_and_the_same_command_continues(run: SlurmRun):
    job = run.submit()
    run.wait_groups(3)
    os.kill(run.record()["pid"], signal.SIGKILL)
    run.wait(job, "FAILED")
    run.wait_services_gone()
    again = run.submit()
    run.wait(again, "COMPLETED")
    run.assert_exact()


def test_an_engine_that_never_starts_ends_the_chain_with_the_end_of_its_log(run: SlurmRun):
    flags = ("--set", "engine.args=[--no-such-flag]", "--set", "restarts.limit=2")
    job = run.submit(arguments=flags)
    run.wait(job, "FAILED")
    assert "engine ended 3 times within" in run.output(job)
    assert "unrecognized arguments: --no-such-flag" in run.output(job)
    assert run.job(job)["Restarts"] == "0"
