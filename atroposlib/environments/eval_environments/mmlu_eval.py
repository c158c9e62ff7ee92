"""MMLU, a row of `benchmarks.yaml`.

python environments/eval_environments/mmlu_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

MMLUEvalEnv, MMLUEvalConfig = of_table("mmlu")

if __name__ == "__main__":
    MMLUEvalEnv.cli()
