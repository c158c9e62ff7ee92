"""TriviaQA, a row of `benchmarks.yaml`.

python environments/eval_environments/triviaqa_eval.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

TriviaQAEvalEnv, TriviaQAEvalConfig = of_table("triviaqa")

if __name__ == "__main__":
    TriviaQAEvalEnv.cli()
