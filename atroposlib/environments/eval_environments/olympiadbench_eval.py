"""OlympiadBench, a row of `benchmarks.yaml`.

python environments/eval_environments/olympiadbench_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

OlympiadBenchEvalEnv, OlympiadBenchEvalConfig = of_table("olympiadbench")

if __name__ == "__main__":
    OlympiadBenchEvalEnv.cli()
