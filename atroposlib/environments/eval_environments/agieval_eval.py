"""AGIEval, a row of `benchmarks.yaml`.

python environments/eval_environments/agieval_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

AGIEvalEnv, AGIEvalConfig = of_table("agieval")

if __name__ == "__main__":
    AGIEvalEnv.cli()
