"""AIME, a row of `benchmarks.yaml`.

python environments/eval_environments/aime_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

AIMEEvalEnv, AIMEEvalConfig = of_table("aime")

if __name__ == "__main__":
    AIMEEvalEnv.cli()
