"""AIMO, a row of `benchmarks.yaml`.

python environments/eval_environments/aimo_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

AIMOEvalEnv, AIMOEvalConfig = of_table("aimo")

if __name__ == "__main__":
    AIMOEvalEnv.cli()
