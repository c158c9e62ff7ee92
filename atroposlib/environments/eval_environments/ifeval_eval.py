"""IFEval, a row of `benchmarks.yaml`.

python environments/eval_environments/ifeval_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

IFEvalEnv, IFEvalConfig = of_table("ifeval")

if __name__ == "__main__":
    IFEvalEnv.cli()
