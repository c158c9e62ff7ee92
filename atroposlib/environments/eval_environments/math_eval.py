"""MATH, a row of `benchmarks.yaml`.

python environments/eval_environments/math_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

MATHEvalEnv, MATHEvalConfig = of_table("math")

if __name__ == "__main__":
    MATHEvalEnv.cli()
