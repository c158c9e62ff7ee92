"""Social IQa, a row of `benchmarks.yaml`.

python environments/eval_environments/siqa_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

SIQAEvalEnv, SIQAEvalConfig = of_table("siqa")

if __name__ == "__main__":
    SIQAEvalEnv.cli()
