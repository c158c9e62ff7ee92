"""MuSR, a row of `benchmarks.yaml`.

python environments/eval_environments/musr_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

MuSREvalEnv, MuSREvalConfig = of_table("musr")

if __name__ == "__main__":
    MuSREvalEnv.cli()
