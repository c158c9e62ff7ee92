"""PHYBench, a row of `benchmarks.yaml`.

python environments/eval_environments/phybench_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

PHYBenchEvalEnv, PHYBenchEvalConfig = of_table("phybench")

if __name__ == "__main__":
    PHYBenchEvalEnv.cli()
