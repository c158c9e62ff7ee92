"""Haikus scored by a judge: a second request to a model gives the reward."""

import re

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataItem
from atroposlib.errors import VerifierFault

SUBJECTS = ["rain", "a train at night", "the first snow", "an old dog", "the sea", "a lost key", "bread", "a moth"]
JUDGE = "Rate this haiku about {subject} from 1 to 10. Answer with the number alone.\n\n{haiku}"


class HaikuEnv(BaseEnv):
    """Score 0.0 to 1.0 from a judge's grade; a grade that cannot be read gives no score and takes no loss."""

    name = "haiku"

    @classmethod
    def config_init(cls):
        engine = APIServerConfig(
            model_name="smollm2-135m",  # what `atropos engine` serves; plays and judges
            base_url="http://localhost:9004/v1",
            server_type="sglang",
            api_key="x",
        )
        return BaseEnvConfig(tokenizer_name="smollm2-135m", group_size=4, max_token_length=64, use_wandb=False), engine

    async def get_item(self, index):
        return {"subject": SUBJECTS[index % len(SUBJECTS)], "number": index}

    async def collect_trajectory(self, item) -> tuple[ScoredDataItem, list[Item]]:
        prompt = [{"role": "user", "content": f"Write a haiku about {item['subject']}."}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(messages=prompt, n=1, max_tokens=self.config.max_token_length)
            node = managed.get_state()["nodes"][-1]
        haiku = reply.choices[0].message.content
        question = JUDGE.format(subject=item["subject"], haiku=haiku)
        async with self.server.managed_server(tokenizer=self.tokenizer) as judge:  # its tokens are not recorded
            verdict = await judge.chat_completion(
                messages=[{"role": "user", "content": question}], n=1, max_tokens=8, temperature=0.0
            )
        return {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": grade(verdict.choices[0].message.content),
        }, []


def grade(text: str | None) -> float:
    """Return the judge's grade as 0.0 to 1.0; VerifierFault when there is none from 1 to 10."""
    first = re.search(r"\d+", text or "")
    number = int(first[0][:9]) if first else 0
    if not 1 <= number <= 10:
        raise VerifierFault(f"the judge said {str(text)[:80]!r}; expected a number from 1 to 10")
    return (number - 1) / 9


if __name__ == "__main__":
    HaikuEnv.cli()
