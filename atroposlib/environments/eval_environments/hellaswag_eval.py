"""HellaSwag, a row of `benchmarks.yaml`.

python environments/eval_environments/hellaswag_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

HellaSwagEvalEnv, HellaSwagEvalConfig = of_table("hellaswag")

if __name__ == "__main__":
    HellaSwagEvalEnv.cli()
