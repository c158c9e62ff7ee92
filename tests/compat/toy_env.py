"""An environment on nothing but upstream's public names, so that it runs on either package unchanged.

python toy_env.py serve --env.rollout_server_url http://127.0.0.1:8000
"""

import os
import re

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class ToyEnv(BaseEnv):
    """Sums, answered by an engine that knows every second one."""

    name = "toy"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            tokenizer_name=os.environ["TOY_TOKENIZER"],
            group_size=4,
            max_token_length=64,
            total_steps=int(os.environ["TOY_STEPS"]),
            steps_per_eval=0,
            use_wandb=False,
            wandb_name="toy",
            ensure_scores_are_not_same=False,
            include_messages=True,
        )
        server = APIServerConfig(
            model_name="toy",
            base_url=os.environ["TOY_ENGINE"] + "/v1",
            api_key="x",
            server_type="vllm",
            tokenizer_name=os.environ["TOY_TOKENIZER"],
        )
        return config, [server]

    def __init__(self, config, server_configs, slurm=False, testing=False):
        super().__init__(config, server_configs, slurm, testing)
        self.count = 0

    async def setup(self):
        self.scores_seen = []

    async def get_next_item(self):
        self.count += 1
        return {"left": self.count, "right": 2 * self.count}

    async def collect_trajectories(self, item):
        question = [{"role": "user", "content": f"{item['left']}+{item['right']}"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=question, n=self.config.group_size, max_tokens=self.config.max_token_length, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup()
        group["tokens"] = [node.tokens for node in nodes]
        group["masks"] = [node.masked_tokens for node in nodes]
        group["inference_logprobs"] = [node.logprobs for node in nodes]
        right = item["left"] + item["right"]
        numbers = [re.findall(r"\d+", choice.message.content or "") for choice in reply.choices]
        group["scores"] = [1.0 if found and int(found[-1]) == right else -1.0 for found in numbers]
        group["group_overrides"] = {"asked": f"{item['left']}+{item['right']}"}
        return group, []

    async def evaluate(self, *args, **kwargs):
        return None

    async def wandb_log(self, wandb_metrics=None):
        await super().wandb_log(wandb_metrics)


if __name__ == "__main__":
    ToyEnv.cli()
