"""MixEval, a row of `benchmarks.yaml`.

python environments/eval_environments/mixeval_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

MixEvalEnv, MixEvalConfig = of_table("mixeval")

if __name__ == "__main__":
    MixEvalEnv.cli()
