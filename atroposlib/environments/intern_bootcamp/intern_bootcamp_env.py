"""The InternBootcamp environment: generated problems of many tasks, each scored by its task's own verifier.

python environments/intern_bootcamp/intern_bootcamp_env.py process --config config_process.yaml
"""

import asyncio
import logging
import time
from collections import Counter
from typing import Any

from atroposlib.environments.cut_off import overrides_of
from atroposlib.environments.intern_bootcamp.bootcamp_config import InternBootcampEnvConfig
from atroposlib.environments.intern_bootcamp.problems import Problem, ProblemSource, require_chosen_tasks
from atroposlib.environments.intern_bootcamp.rewards import reward
from atroposlib.environments.sandboxed_env import SandboxedEnv
from atroposlib.environments.thoughts import opening_of, whole_reply
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, ScoredDataGroup, ServerBaseline
from atroposlib.envs.cli import Settings
from atroposlib.envs.server_handling.chat_prompt import render
from atroposlib.errors import EnvironmentFault, RolloutFault
from atroposlib.rollouts.early_stop import sample_until
from atroposlib.rollouts.failures import is_scored, scored

logger = logging.getLogger(__name__)


class InternBootcampEnv(SandboxedEnv):
    """Score `correct_reward` for a right answer, else `incorrect_reward` plus partial credit."""

    name = "intern_bootcamp"
    env_config_cls = InternBootcampEnvConfig
    config: InternBootcampEnvConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        server = APIServerConfig(
            model_name="deepseek-ai/DeepSeek-R1",
            base_url="http://localhost:30000/v1",
            server_type="sglang",
            api_key="x",
        )
        config = InternBootcampEnvConfig(group_size=16, max_token_length=16384, tokenizer_name=server.model_name)
        return config, [server]

    async def setup(self) -> None:
        """Open the tasks; ConfigError when one does not exist."""
        require_chosen_tasks(self.config, [server.config.model_name for server in self.server.servers])
        self.problems = ProblemSource(self.config)
        self.sandbox = self.problems.sandbox
        self.opening = opening_of(render(self.tokenizer, [{"role": "user", "content": ""}]))
        self.verdicts: dict[str, Counter[str]] = {}  # task -> counts of "responses" and "correct" since the last log
        self.eval_metrics: dict[str, float] = {}
        await self.problems.check()

    @classmethod
    async def preview(cls, settings: Settings) -> list[str]:
        config = settings.env
        assert isinstance(config, InternBootcampEnvConfig)
        servers = [settings.servers] if isinstance(settings.servers, ServerBaseline) else settings.servers
        require_chosen_tasks(config, [server.model_name for server in servers])
        problems = ProblemSource(config)
        try:
            await problems.check()
            return await problems.preview()
        finally:
            await problems.close()

    async def get_item(self, index: int) -> Problem:
        return await self.problems.problem(index)

    def item_task(self, item: Problem) -> str:
        return item[1]["task_name"]

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup, list[Problem]]:
        messages, meta = item
        if "fault" in meta:
            raise EnvironmentFault(meta["fault"])
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:

            async def ask(size: int) -> list[tuple[str, float]]:
                reply = await managed.chat_completion(
                    messages=messages,
                    n=size,
                    max_tokens=self.config.max_token_length,
                    temperature=self.config.temperature,
                    top_p=self.config.top_p,
                )
                texts = [whole_reply(choice.message.content or "", self.opening) for choice in reply.choices]
                return [(text, await scored(self.problems.verify(text, meta))) for text in texts]

            answers = await sample_until(
                self.early_stop,
                self.config.group_size,
                ask,
                lambda answer: is_scored(answer[1]) and self.score(answer[1]) > self.config.accept_score,
            )
            nodes = managed.get_state()["nodes"]
        texts, verdicts = [text for text, _ in answers], [verdict for _, verdict in answers]
        self.count(meta["task_name"], verdicts)
        group: dict[str, Any] = {
            "task": meta["task_name"],
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [self.score(verdict) for verdict in verdicts],
            "overrides": overrides_of(nodes, [is_scored(verdict) and verdict >= 1 for verdict in verdicts]),
            "messages": [[*messages, {"role": "assistant", "content": text}] for text in texts],
        }
        return self.sized(group), []  # pyright: ignore[reportArgumentType]  # a group may carry its task

    def score(self, verdict: float) -> float:
        """Reward of one verdict, none for none."""
        config = self.config
        if not is_scored(verdict):
            return verdict
        return reward(verdict, correct_reward=config.correct_reward, incorrect_reward=config.incorrect_reward)

    def count(self, task: str, verdicts: list[float]) -> None:
        """Remember how many responses were right, for the next log."""
        given = [verdict for verdict in verdicts if is_scored(verdict)]
        if given:
            counts = self.verdicts.setdefault(task, Counter())
            counts["responses"] += len(given)
            counts["correct"] += sum(verdict >= 1 for verdict in given)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Greedy answers to `eval_problems` problems drawn apart from training; those that fail are left out."""
        started = time.time()
        at_once = asyncio.Semaphore(self.config.max_eval_workers)
        count = self.config.eval_problems
        results = await asyncio.gather(*(self.evaluate_one(index, at_once) for index in range(count)))
        samples = [sample for sample in results if sample is not None]
        if not samples:
            raise EnvironmentFault(f"all {count} problems of the evaluation failed; the log has the reasons")
        self.eval_metrics = {
            "eval/percent_correct": sum(sample["verdict"] >= 1 for sample in samples) / len(samples),
            "eval/failed": count - len(samples),
        }
        await self.evaluate_log(
            self.eval_metrics,
            samples=samples,
            start_time=started,
            end_time=time.time(),
            generation_parameters={"temperature": 0.0},
        )

    async def evaluate_one(self, index: int, at_once: asyncio.Semaphore) -> dict[str, Any] | None:
        """One answered problem: task, messages, response, verdict, score; None when it failed."""
        messages, meta = await self.problems.problem(index, "eval")
        try:
            if "fault" in meta:
                raise EnvironmentFault(meta["fault"])
            async with at_once:
                reply = await self.server.chat_completion(
                    messages=messages, n=1, max_tokens=self.config.max_token_length, temperature=0.0, split="eval"
                )
            text = whole_reply(reply.choices[0].message.content or "", self.opening)
            verdict = await self.problems.verify(text, meta)
        except RolloutFault as fault:
            logger.warning("evaluation problem failed: task=%s index=%d error=%s", meta["task_name"], index, fault)
            return None
        facts = {"task": meta["task_name"], "messages": messages, "response": text}
        return {**facts, "verdict": verdict, "score": self.score(verdict)}

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {**(wandb_metrics or {}), **self.eval_metrics}
        total = sum(self.verdicts.values(), Counter())
        if total["responses"]:
            metrics["train/percent_correct"] = total["correct"] / total["responses"]
        for task, counts in self.verdicts.items():
            metrics[f"train/percent_correct_{task}"] = counts["correct"] / counts["responses"]
        self.verdicts, self.eval_metrics = {}, {}
        await super().wandb_log(metrics)


if __name__ == "__main__":
    InternBootcampEnv.cli()
