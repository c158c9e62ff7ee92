"""BIG-Bench Hard, a row of `benchmarks.yaml`.

python environments/eval_environments/bbh_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

BBHEvalEnv, BBHEvalConfig = of_table("bbh")

if __name__ == "__main__":
    BBHEvalEnv.cli()
