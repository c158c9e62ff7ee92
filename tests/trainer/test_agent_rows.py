"""Rows of agents in the trainer: every log-probability is recomputed from the ids, and the reward rises."""

import asyncio
import json

import torch
from tiny_model import make_config
from transformers import AutoTokenizer

from atroposlib.envs.server_handling.agents.dialect import CHAT
from atroposlib.envs.server_handling.agents.rollouts import Rollouts, managed_for
from atroposlib.envs.server_handling.agents.rows import group_of
from atroposlib.envs.server_handling.agents.settings import RolloutSettings
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.example_trainer.data import rows_of
from atroposlib.example_trainer.learner import Learner

TURNS, WORDS, LIKED = 2, 3, 32  # replies of three words; the first 32 of 64 are what the reward likes


class ModelServer:
    """Samples from the weights that the trainer has now, as an engine without a gap would."""

    config = APIServerConfig(model_name="tiny", base_url="http://tiny/v1", health_check=False)

    def __init__(self, model):
        self.model, self.generator = model, torch.Generator().manual_seed(0)

    async def tokens_and_logprobs_completion(self, *, input_ids, **_):
        ids, logprobs = list(input_ids), []
        for _ in range(WORDS):
            with torch.no_grad():
                scores = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1].float(), -1)
            ids.append(int(torch.multinomial(scores.exp(), 1, generator=self.generator)))
            logprobs.append(float(scores[ids[-1]]))
        return input_ids, [ids[len(input_ids) :]], [logprobs], ["length"]


async def roll_out(rollouts, number):
    """An agent of two turns; the second of every second one changes what was said, and begins a branch."""
    rollout = rollouts.create(RolloutSettings())
    messages = [{"role": "user", "content": f"w{number} w5"}]
    for turn in range(TURNS):
        body = {"messages": messages}
        exchange = await rollout.exchange(CHAT.parse(body, rollout), json.dumps(body).encode())
        said = exchange.answers[0].message
        if number % 2 and turn == 0:
            said = {**said, "content": said["content"] + " w9"}
        messages += [said, {"role": "user", "content": "w7"}]
    ids = [token for exchange in rollout.exchanges for call in exchange.calls for token in call.output]
    rollout.add_score(sum(token < LIKED for token in ids) / len(ids))
    return rollout


async def group(rollouts):
    return group_of([await roll_out(rollouts, number) for number in (10, 11, 12, 13)])


def test_log_probabilities_of_all_turns_and_branches_are_those_of_the_ids_and_the_reward_rises(tiny_model, tmp_path):
    torch.manual_seed(0)
    learner = Learner(make_config(tiny_model, tmp_path, lr=0.02, training_steps=8, seq_len=128))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    server = ModelServer(learner.policy.model)
    rollouts = Rollouts(lambda settings: managed_for(server, tokenizer, settings))
    rewards = []
    for _ in range(8):
        groups = [asyncio.run(group(rollouts)) for _ in range(2)]
        rows = rows_of(groups, seq_len=128, temperature=1.0)
        assert len(groups[0]["tokens"]) == 6  # two agents keep to one row, two branch
        metrics = learner.train_on(rows)
        assert metrics["train/logprob_unknown"] == 0
        assert metrics["train/logprob_diff_max"] < 1e-4
        rewards.append(sum(sum(one["scores"]) / len(one["scores"]) for one in groups) / 2)
    assert rewards[-1] > 0.8 > 0.5 > rewards[0]
