"""PIQA, a row of `benchmarks.yaml`.

python environments/eval_environments/piqa_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

PIQAEvalEnv, PIQAEvalConfig = of_table("piqa")

if __name__ == "__main__":
    PIQAEvalEnv.cli()
