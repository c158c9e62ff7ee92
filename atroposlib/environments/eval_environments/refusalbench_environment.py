"""RefusalBench, a row of `benchmarks.yaml`.

python environments/eval_environments/refusalbench_environment.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

RefusalBenchEnv, RefusalBenchConfig = of_table("refusalbench")

if __name__ == "__main__":
    RefusalBenchEnv.cli()
