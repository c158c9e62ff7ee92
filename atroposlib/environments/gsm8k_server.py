"""GSM8K: grade-school word problems, answered in \\boxed{} and judged by math-verify.

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
from atroposlib.environments.sandbox import Sandbox, SandboxError
from atroposlib.environments.sandboxed_env import SandboxedEnv
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, ScoredDataGroup
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault, VerifierFault
from atroposlib.rollouts.failures import is_scored, scored
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
    verifier_workers: PositiveInt = Field(default=2, description="Processes for math-verify.")
    verifier_timeout_s: PositiveFloat = Field(default=10, description="Seconds it may take for one response.")


class GSM8kEnv(SandboxedEnv):
    """Score 1.0 for the right number in the last \\boxed{}, else -1.0."""

    name = "gsm8k"
    env_config_cls = GSM8kConfig
    config: GSM8kConfig

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
        self.sandbox = Sandbox(workers=self.config.verifier_workers, timeout_s=self.config.verifier_timeout_s)
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
        scores = [await scored(self.score(text, item)) for text in texts]
        right = [is_scored(score) and score > 0 for score in scores]
        self.percent_correct += [float(score > 0) for score in scores if is_scored(score)]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": scores,
            "overrides": overrides_of(nodes, right),
            "messages": [[*messages, {"role": "assistant", "content": text}] for text in texts],
        }, []

    async def score(self, text: str, item: Question) -> float:
        """1.0 for a right answer, else -1.0; VerifierFault when nobody can say."""
        return 1.0 if await self.is_right(text, item) else -1.0

    async def is_right(self, text: str, item: Question) -> bool:
        """Ask math-verify; VerifierFault when it fails."""
        assert self.sandbox is not None
        try:
            opening = ("atroposlib.environments.math_answers:load", "")
            return await self.sandbox.call(
                "atroposlib.environments.math_answers:is_right", text, item["gold"], opening=opening
            )
        except SandboxError as error:
            raise VerifierFault(f"math-verify failed on {text[-100:]!r} against {item['gold']!r}: {error}") from error

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
                text = reply.choices[0].message.content or ""
                return {**item, "response": text, "score": int(await self.is_right(text, item))}
        except RolloutFault as fault:
            logger.warning("evaluation problem failed: question=%r error=%s", item["question"][:80], fault)
            return None

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {**(wandb_metrics or {}), **self.eval_metrics}
        if self.percent_correct:
            metrics["train/percent_correct"] = sum(self.percent_correct) / len(self.percent_correct)
        self.percent_correct, self.eval_metrics = [], {}
        await super().wandb_log(metrics)


if __name__ == "__main__":
    GSM8kEnv.cli()
