"""Arena-Hard, a row of `benchmarks.yaml`.

python environments/eval_environments/arena_hard_environment.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

ArenaHardEnv, ArenaHardConfig = of_table("arena_hard")

if __name__ == "__main__":
    ArenaHardEnv.cli()
