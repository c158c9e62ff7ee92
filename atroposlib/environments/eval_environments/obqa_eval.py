"""OpenBookQA, a row of `benchmarks.yaml`.

python environments/eval_environments/obqa_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

OBQAEvalEnv, OBQAEvalConfig = of_table("obqa")

if __name__ == "__main__":
    OBQAEvalEnv.cli()
