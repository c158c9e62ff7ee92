"""slurm/causal.sh on a real SLURM: collect as an array, dataset and surrogate, each after the one before it."""

import os
import subprocess
import sys

import pytest

from tests.slurm.conftest import REPOSITORY, SlurmRun

SETTINGS = """
DATA=$HOME/causal
SEED=3
TASKS=2
ATTEMPTS=24
DIFFICULTY=1
EPOCHS=2
DESIGNS=2
COLLECT_OPTIONS=--cpus-per-task=1
DATASET_OPTIONS=--cpus-per-task=1
SURROGATE_OPTIONS=--cpus-per-task=1
"""


def test_the_causal_stages_run_one_after_the_other(run: SlurmRun):
    pytest.importorskip("scipy")
    pytest.importorskip("torch")
    (run.folder / "small.env").write_text(SETTINGS)
    (run.folder / "slurm").unlink()
    (run.folder / "slurm").mkdir()
    for script in ("causal.sh", "causal.slurm", "chain.sh"):
        (run.folder / "slurm" / script).write_bytes((REPOSITORY / "slurm" / script).read_bytes())
    environ = {
        **run.environ,
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "HOME": str(run.folder),
    }
    command = ["bash", "slurm/causal.sh", "small.env"]
    done = subprocess.run(command, env=environ, cwd=run.folder, capture_output=True, text=True, timeout=60, check=True)
    run.jobs += [line.split("job ")[1].split(" ")[0] for line in done.stdout.splitlines()]
    assert len(run.jobs) == 3
    for job in run.jobs:
        run.wait(job, "COMPLETED")
    data = run.folder / "causal"
    assert sorted(path.name for path in (data / "demos").iterdir()) == ["seed3", "seed4"]
    assert (data / "report.html").exists()
    assert list((data / "tensors").glob("train-*.npz"))
    assert (data / "surrogate.npz").exists()
