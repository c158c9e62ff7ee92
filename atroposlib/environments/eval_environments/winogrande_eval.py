"""WinoGrande, a row of `benchmarks.yaml`.

python environments/eval_environments/winogrande_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

WinoGrandeEvalEnv, WinoGrandeEvalConfig = of_table("winogrande")

if __name__ == "__main__":
    WinoGrandeEvalEnv.cli()
