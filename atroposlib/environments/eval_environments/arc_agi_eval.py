"""ARC-AGI, a row of `benchmarks.yaml`.

python environments/eval_environments/arc_agi_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

ARCAGIEvalEnv, ARCAGIEvalConfig = of_table("arc_agi")

if __name__ == "__main__":
    ARCAGIEvalEnv.cli()
