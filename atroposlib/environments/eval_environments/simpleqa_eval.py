"""SimpleQA, a row of `benchmarks.yaml`.

python environments/eval_environments/simpleqa_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

SimpleQAEvalEnv, SimpleQAEvalConfig = of_table("simpleqa")

if __name__ == "__main__":
    SimpleQAEvalEnv.cli()
