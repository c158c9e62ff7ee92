"""The flagship job on a SLURM of three nodes: engines on nodes 2 and 3, the rest on node 1; every part may be lost."""

import contextlib
import os
import signal
from pathlib import Path

from tests.slurm.conftest import PROBLEMS, RESPONSES, SlurmRun, processes_of

NODES = ("--nodes=3", "--gpus-per-node=8")
SERVERS = {"sglang-n2-9000", "sglang-n2-9001", "sglang-n3-9000", "sglang-n3-9001"}


def submit(run: SlurmRun, *arguments: str, **variables: str) -> str:
    return run.submit(*NODES, arguments=arguments, TP="4", STAND_IN_SECONDS="1.5", **variables)


def engines(node: str) -> list[int]:
    """The servers of the node."""
    found = []
    for pid in processes_of(node):
        with contextlib.suppress(OSError):
            program, *words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"sglang.launch_server" in words and not program.endswith(b"srun"):
                found.append(pid)
    return found


def assert_each_problem_once(run: SlurmRun) -> None:
    run.assert_exact()
    groups = [group["group_id"] for group in run.groups()]
    assert len(set(groups)) == len(groups) == PROBLEMS


def test_engines_run_on_two_nodes_and_every_problem_is_asked_once(run3: SlurmRun):
    job = submit(run3)
    run3.wait_groups(4)
    assert set(run3.restarts()) == {*SERVERS, "api", "fake_trainer", "environment"}
    assert {group["engine"]["base_url"].split("//")[1].split(":")[0] for group in run3.groups()} <= {"n2", "n3"}
    run3.wait(job, "COMPLETED")
    assert_each_problem_once(run3)
    assert set(run3.generated().values()) == {RESPONSES}
    assert len(run3.generated()) == PROBLEMS
    run3.wait_services_gone()
    assert not engines("n2")
    assert not engines("n3")


def test_the_router_stands_in_front_of_all_engines(run3: SlurmRun):
    job = submit(run3, "--set", "engine.router=true")
    run3.wait(job, "COMPLETED")
    assert_each_problem_once(run3)
    assert {group["engine"]["base_url"].split("//")[1].split(":")[0] for group in run3.groups()} == {"127.0.0.1"}
    assert set(run3.restarts()) == {*SERVERS, "router", "api", "fake_trainer", "environment"}


def test_every_engine_of_a_job_may_be_lost_at_once(run3: SlurmRun):
    job = submit(run3)
    run3.wait_groups(4)
    lost = [*engines("n2"), *engines("n3")]
    assert len(lost) == len(SERVERS)
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    run3.wait(job, "COMPLETED")
    assert_each_problem_once(run3)
    assert {run3.restarts()[name] for name in SERVERS} == {1}
    assert run3.job(job)["Restarts"] == "0"


def test_a_node_with_engines_may_be_lost(run3: SlurmRun):
    lose(run3, "n2")


def test_the_first_node_may_be_lost(run3: SlurmRun):
    lose(run3, "n1")


def lose(run: SlurmRun, node: str) -> None:
    """The other engines continue until SLURM notices; a job that is queued again records what is missing."""
    job = submit(run)
    run.wait_groups(4)
    kept = {group["group_id"] for group in run.groups()}
    run.lose_node(node)
    try:
        run.until(lambda: run.job(job)["Restarts"] == "1" or run.states(job) == ["COMPLETED"], lambda: run.output(job))
    finally:
        run.start_node(node)
    run.wait(job, "COMPLETED")
    assert_each_problem_once(run)
    assert kept <= {group["group_id"] for group in run.groups()}
    run.until(lambda: run.slurm("sinfo", "-h", "-p", "debug", "-o", "%T %D").split() == ["idle", "3"], lambda: node)


def test_the_tasks_of_an_array_lie_on_different_nodes_and_share_the_run(run3: SlurmRun):
    job = run3.submit(
        *("--array=0-2", "--gpus-per-node=8"),
        arguments=("--set", "share.problems_per_lease=2"),
        TP="8",
        STAND_IN_SECONDS="1.5",
    )
    run3.wait_groups(3)
    assert {run3.job(f"{job}_{task}")["BatchHost"] for task in range(3)} == {"n1", "n2", "n3"}
    run3.wait(job, "COMPLETED")
    assert_each_problem_once(run3)
    assert set(run3.generated().values()) == {RESPONSES}
