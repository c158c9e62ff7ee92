"""MT-Bench, a row of `benchmarks.yaml`.

python environments/eval_environments/mtbench_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

MTBenchEvalEnv, MTBenchEvalConfig = of_table("mtbench")

if __name__ == "__main__":
    MTBenchEvalEnv.cli()
