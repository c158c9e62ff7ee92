"""GSM8K, a row of `benchmarks.yaml`.

python environments/eval_environments/gsm8k_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

GSM8KEvalEnv, GSM8KEvalConfig = of_table("gsm8k")

if __name__ == "__main__":
    GSM8KEvalEnv.cli()
