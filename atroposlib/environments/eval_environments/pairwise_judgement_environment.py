"""RewardBench 2: the model tells the best of four answers, a row of `benchmarks.yaml`.

python environments/eval_environments/pairwise_judgement_environment.py evaluate --env.dataset my_rows.jsonl
"""

from atroposlib.environments.eval_environments.benchmark import of_table

PairwiseJudgementEnv, PairwiseJudgementConfig = of_table("pairwise_judgement")

if __name__ == "__main__":
    PairwiseJudgementEnv.cli()
