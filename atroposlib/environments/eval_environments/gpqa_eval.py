"""GPQA, a row of `benchmarks.yaml`.

python environments/eval_environments/gpqa_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

GPQAEvalEnv, GPQAEvalConfig = of_table("gpqa")

if __name__ == "__main__":
    GPQAEvalEnv.cli()
