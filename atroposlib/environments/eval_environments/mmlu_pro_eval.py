"""MMLU-Pro, a row of `benchmarks.yaml`.

python environments/eval_environments/mmlu_pro_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

MMLUProEvalEnv, MMLUProEvalConfig = of_table("mmlu_pro")

if __name__ == "__main__":
    MMLUProEvalEnv.cli()
