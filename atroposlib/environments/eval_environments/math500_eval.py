"""MATH-500, a row of `benchmarks.yaml`.

python environments/eval_environments/math500_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

MATH500EvalEnv, MATH500EvalConfig = of_table("math500")

if __name__ == "__main__":
    MATH500EvalEnv.cli()
