"""ARC, a row of `benchmarks.yaml`.

python environments/eval_environments/arc_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

ARCEvalEnv, ARCEvalConfig = of_table("arc")

if __name__ == "__main__":
    ARCEvalEnv.cli()
