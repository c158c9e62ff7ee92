"""DROP, a row of `benchmarks.yaml`.

python environments/eval_environments/drop_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

DROPEvalEnv, DROPEvalConfig = of_table("drop")

if __name__ == "__main__":
    DROPEvalEnv.cli()
