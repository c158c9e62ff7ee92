"""Humanity's Last Exam, a row of `benchmarks.yaml`.

python environments/eval_environments/hle_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

HLEEvalEnv, HLEEvalConfig = of_table("hle")

if __name__ == "__main__":
    HLEEvalEnv.cli()
