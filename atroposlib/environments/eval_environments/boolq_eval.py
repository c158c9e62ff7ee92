"""BoolQ, a row of `benchmarks.yaml`.

python environments/eval_environments/boolq_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

BoolQEvalEnv, BoolQEvalConfig = of_table("boolq")

if __name__ == "__main__":
    BoolQEvalEnv.cli()
