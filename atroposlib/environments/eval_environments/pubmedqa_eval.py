"""PubMedQA, a row of `benchmarks.yaml`.

python environments/eval_environments/pubmedqa_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

PubMedQAEvalEnv, PubMedQAEvalConfig = of_table("pubmedqa")

if __name__ == "__main__":
    PubMedQAEvalEnv.cli()
