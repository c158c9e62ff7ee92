"""slurm/train.slurm on a real SLURM: which GPUs go where, signals, exit codes, and training after collecting."""

import os
import subprocess
import sys

from tests.slurm.conftest import HERE, SlurmRun

RECIPE = ("slurm/train.slurm", "configs/trainer/grpo.yaml", "--run-dir", "out")


def submit(run: SlurmRun, *options: str, **variables: str) -> str:
    """The script with a stand-in for `atropos-grpo-run`."""
    path = f"{HERE / 'stand_in' / 'bin'}:{os.environ['PATH']}"
    environ = {**run.environ, "VIRTUAL_ENV": sys.prefix, "PATH": path, **variables}
    command = ["sbatch", "--parsable", "--cpus-per-task=1", *options, *RECIPE]
    done = subprocess.run(command, env=environ, cwd=run.folder, capture_output=True, text=True, timeout=60, check=True)
    run.jobs.append(done.stdout.strip())
    return run.jobs[-1]


def wait_for(run: SlurmRun, job: str, text: str) -> None:
    run.until(lambda: text in run.output(job), lambda: run.output(job))


def test_the_first_gpu_is_the_engines_and_usr1_queues_the_job_again(run: SlurmRun):
    job = submit(run, "--gpus-per-node=4")
    wait_for(run, job, "engine: 0 trainer: 1,2,3")
    assert "arguments: --config configs/trainer/grpo.yaml --run-dir out" in run.output(job)
    run.slurm("scancel", "--batch", "--signal=USR1", job)
    run.wait(job, "COMPLETED")
    assert run.job(job)["Restarts"] == "1"


def test_the_exit_code_is_the_trainers_and_one_gpu_is_shared(run: SlurmRun):
    job = submit(run, "--gpus-per-node=1", STAND_IN_CODE="7")
    wait_for(run, job, "engine: all trainer: all")
    run.slurm("scancel", "--batch", "--signal=USR1", job)
    run.wait(job, "FAILED")
    assert run.job(job)["ExitCode"] == "7:0"


def test_training_waits_for_the_data_also_when_collecting_is_requeued(run: SlurmRun):
    collecting = run.submit("--gpus-per-node=8")
    training = submit(run, f"--dependency=afterok:{collecting}", "--gpus-per-node=2")
    run.wait_groups(3)
    run.slurm("scontrol", "requeue", collecting)
    run.wait(collecting, "COMPLETED")
    run.assert_exact()
    wait_for(run, training, "engine: 0 trainer: 1")
