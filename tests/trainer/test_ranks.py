"""Two real processes on the CPU against one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
import torch
from tiny_model import make_config, make_group
from atroposlib.example_trainer.data import rows_of
from atroposlib.example_trainer.learner import Learner

config = make_config(Path(sys.argv[1]), Path(sys.argv[2]), micro_batch_tokens=16, init_kl_coeff=0.1, kl_target=0.01,
                     kl_horizon=10)
learner = Learner(config)
groups = [make_group([1, 0, 0, 1], completions=[3, 9, 5, 1], seed=1), make_group([0, 0, 1, 0], seed=2)]
rows = rows_of(groups, seq_len=64, temperature=1.0) if learner.ranks.is_first else []
for _ in range(2):
    metrics = learner.train_on(learner.ranks.share(rows))
beta, learner.kl.beta = learner.kl.beta, 0.0
flat = rows_of([make_group([1, 1])], seq_len=64, temperature=1.0) if learner.ranks.is_first else []
before = [p.detach().clone() for p in learner.policy.trainable]
learner.train_on(learner.ranks.share(flat))
moved = sum((p - old).abs().sum().item() for p, old in zip(learner.policy.trainable, before))
out = {"moved": moved, "weights": torch.cat([p.detach().flatten() for p in learner.policy.trainable]), "beta": beta,
       "loss": metrics["train/loss"], "diff": metrics["train/logprob_diff_mean"]}
torch.save(out, Path(sys.argv[2]) / f"rank{learner.ranks.rank}of{learner.ranks.size}.pt")
learner.ranks.leave()
"""


def start(tiny_model, folder, rank, size, port):
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", PROGRAM, str(tiny_model), str(folder), str(Path(__file__).parent)]
    return subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_two_ranks_take_the_same_steps_as_one(tiny_model, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for size in (1, 2):
        processes = [start(tiny_model, tmp_path, rank, size, port) for rank in range(size)]
        try:
            for process in processes:
                _, errors = process.communicate(timeout=400)
                assert process.returncode == 0, errors
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("rank0of1", "rank0of2", "rank1of2"))
    assert torch.equal(first["weights"], second["weights"])
    assert first["beta"] == second["beta"]
    assert first["moved"] == alone["moved"] == 0  # by a batch without a signal
    torch.testing.assert_close(first["weights"], alone["weights"], atol=1e-4, rtol=0)
    for key in ("loss", "diff", "beta"):
        assert abs(first[key] - alone[key]) < 1e-5
