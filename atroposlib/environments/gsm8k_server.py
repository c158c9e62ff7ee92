"""GSM8K: grade-school word problems, answered in \\boxed{}.

python environments/gsm8k_server.py process --env.dataset my_problems.jsonl
"""

import asyncio
import importlib.util
import logging
import time
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from atroposlib.environments.cut_off import overrides_of
from atroposlib.environments.gsm8k_problems import Question, load_problems, order
from atroposlib.environments.thoughts import opening_of, text_of
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.reward_fns.math_judge import MathJudge, Verdict, scores
from atroposlib.envs.server_handling.chat_prompt import render
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault
from atroposlib.type_definitions import Message

logger = logging.getLogger(__name__)

SYSTEM_PROMPT = (
    "Think about the problem step by step inside <think> and </think>. After that, give the final answer, a number, "
    "in \\boxed{}."
)


class GSM8kConfig(BaseEnvConfig):
    """Where the problems come from, and how they are answered."""

    dataset: str = Field(
        default="openai/gsm8k",
        description="A .jsonl file with the fields question and answer (GSM8K's own, or just the number), or a name on "
        "the model hub, which needs the package datasets.",
    )
    eval_dataset: str | None = Field(
        default=None,
        description="Another such file for evaluation. null: the hub's test split, or every tenth line of the file, "
        "which is then not trained on.",
    )
    seed: int = Field(default=0, description="Decides the order of the problems.")
    epochs: PositiveInt = Field(default=1, description="How often all problems are rolled out.")
    system_prompt: str = Field(default=SYSTEM_PROMPT, description="Empty: none.")
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature of rollouts; evaluation uses 0.")
    verifier_workers: PositiveInt = Field(default=2, description="Processes for answers that need algebra.")
    verifier_timeout_s: PositiveFloat = Field(
        default=10, description="Seconds such a process may take for one response."
    )


class GSM8kEnv(BaseEnv):
    """Score 1.0 for the right number as the last answer after the thinking, else -1.0."""

    name = "gsm8k"
    env_config_cls = GSM8kConfig
    config: GSM8kConfig
    judge: MathJudge | None = None

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        server = APIServerConfig(
            model_name="Qwen/Qwen3-4B", base_url="http://localhost:9001/v1", server_type="sglang", api_key="x"
        )
        return GSM8kConfig(group_size=8, max_token_length=2048, tokenizer_name=server.model_name), [server]

    async def setup(self) -> None:
        """Load the problems; ConfigError or DataError when they cannot be used, or not judged."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("answers are judged by the package math-verify; run: pip install 'atroposlib[envs]'")
        self.problems = await asyncio.to_thread(load_problems, self.config.dataset, self.config.eval_dataset)
        self.judge = MathJudge(workers=self.config.verifier_workers, timeout_s=self.config.verifier_timeout_s)
        self.opening = opening_of(render(self.tokenizer, [{"role": "user", "content": ""}]))
        self.percent_correct: list[float] = []
        self.eval_metrics: dict[str, float] = {}

    async def get_item(self, index: int) -> Question | None:
        train = self.problems["train"]
        epoch, position = divmod(index, len(train))
        if epoch >= self.config.epochs:
            return None
        return train[order(len(train), f"{self.config.seed}/{epoch}")[position]]

    async def collect_trajectories(self, item: Question) -> tuple[ScoredDataGroup, list[Question]]:
        messages = self.messages(item)
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=messages,
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=self.config.temperature,
            )
            nodes = managed.get_state()["nodes"]
        texts = [choice.message.content or "" for choice in reply.choices]
        verdicts = await self.verdicts([text_of(choice.message, self.opening) for choice in reply.choices], item)
        self.percent_correct.extend(float(verdict.right) for verdict in verdicts if verdict.right is not None)
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": scores(verdicts, right=1.0, wrong=-1.0),
            "overrides": overrides_of(nodes, [verdict.right is not False for verdict in verdicts]),
            "messages": [[*messages, {"role": "assistant", "content": text}] for text in texts],
        }, []

    async def verdicts(self, replies: list[str], item: Question) -> list[Verdict]:
        """Judge whole replies to one problem."""
        assert self.judge is not None
        return await self.judge.judge_async(replies, item["gold"])

    def messages(self, item: Question) -> list[Message]:
        """The prompt of one problem."""
        system: list[Message] = [{"role": "system", "content": self.config.system_prompt}]
        return [*(system if self.config.system_prompt else []), {"role": "user", "content": item["question"]}]

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Greedy answers to every problem kept for evaluation; those that fail are left out and counted."""
        started = time.time()
        at_once = asyncio.Semaphore(self.config.max_eval_workers)
        results = await asyncio.gather(*(self.evaluate_one(item, at_once) for item in self.problems["test"]))
        samples = [sample for sample in results if sample is not None]
        if not samples:
            raise EnvironmentFault(f"all {len(results)} problems of the evaluation failed; the log has the reasons")
        self.eval_metrics = {
            "eval/percent_correct": sum(sample["score"] for sample in samples) / len(samples),
            "eval/failed": len(results) - len(samples),
        }
        await self.evaluate_log(
            self.eval_metrics,
            samples=samples,
            start_time=started,
            end_time=time.time(),
            generation_parameters={"temperature": 0.0},
        )

    async def evaluate_one(self, item: Question, at_once: asyncio.Semaphore) -> dict[str, Any] | None:
        """One answered problem; score 1 when right, else 0. None when it failed."""
        try:
            async with at_once:
                reply = await self.server.chat_completion(
                    messages=self.messages(item),
                    n=1,
                    max_tokens=self.config.max_token_length,
                    temperature=0.0,
                    split="eval",
                )
                text = text_of(reply.choices[0].message, self.opening)
                (score,) = scores(await self.verdicts([text], item))
                return {**item, "response": text, "score": int(score > 0)}
        except RolloutFault as fault:
            logger.warning("evaluation problem failed: question=%r error=%s", item["question"][:80], fault)
            return None

    async def teardown(self) -> None:
        if self.judge is not None:
            self.judge.close()

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {**(wandb_metrics or {}), **self.eval_metrics}
        if self.percent_correct:
            metrics["train/percent_correct"] = sum(self.percent_correct) / len(self.percent_correct)
        self.percent_correct, self.eval_metrics = [], {}
        await super().wandb_log(metrics)


if __name__ == "__main__":
    GSM8kEnv.cli()
