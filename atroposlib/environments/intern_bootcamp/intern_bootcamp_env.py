"""The InternBootcamp environment: generated problems of many tasks, each scored by its task's own verifier.

python environments/intern_bootcamp/intern_bootcamp_env.py process --config config_process.yaml
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from atroposlib.environments.intern_bootcamp.bootcamp_config import InternBootcampEnvConfig
from atroposlib.environments.intern_bootcamp.problems import Problem, ProblemSource, require_chosen_tasks
from atroposlib.environments.intern_bootcamp.rewards import reward
from atroposlib.environments.single_turn import Part, SingleTurnEnv
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, ServerBaseline
from atroposlib.envs.cli import Settings
from atroposlib.envs.reward_fns.math_answers import after_thinking
from atroposlib.errors import EnvironmentFault
from atroposlib.rollouts.failures import scored
from atroposlib.sandbox.workers import WorkerPool
from atroposlib.type_definitions import Message


class InternBootcampEnv(SingleTurnEnv):
    """Score `correct_reward` for a right answer, else `incorrect_reward` plus partial credit."""

    name = "intern_bootcamp"
    env_config_cls = InternBootcampEnvConfig
    guessing = 0.15  # of the tasks that are not set aside
    config: InternBootcampEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    sandbox: WorkerPool | None = None

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
        await super().setup()
        await self.problems.check()

    async def teardown(self) -> None:
        if self.sandbox is not None:
            self.sandbox.close()

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

    async def problem(self, part: Part, index: int) -> Problem:
        return await self.problems.problem(index, "train" if part == "train" else "eval")

    def item_task(self, item: Problem) -> str:
        return item[1]["task_name"]

    async def messages(self, item: Problem) -> list[Message]:
        messages, meta = item
        if "fault" in meta:
            raise EnvironmentFault(meta["fault"])
        return messages

    def question(self, item: Problem) -> str:
        return item[1]["raw_prompt"]

    async def grades(self, replies: Sequence[str], item: Problem) -> list[float]:
        """Return the verdicts of the task's own verifier: 1 right, between 0 and 1 partly right or only in form."""

        async def verdict(reply: str) -> float:
            no_answer = after_thinking(reply) is None  # tags in a thought that never ends are none
            return 0.0 if no_answer else await scored(self.problems.verify(reply, item[1]))

        return await asyncio.gather(*map(verdict, replies))

    def gold(self, item: Problem) -> str | None:
        reply, config = item[1].get("demonstration"), self.config
        thought = f"<think>{'I see. ' * (1 + config.min_reasoning_length // 7)}</think>"
        return thought + reply if reply and config.require_reasoning else reply

    def other_spelling(self, item: Problem) -> str | None:
        reply = self.gold(item)
        return reply and reply.replace("<answer>", "So:\n<answer> ").replace("</answer>", "\n</answer>")

    @classmethod
    def check_flags(cls, folder: Path) -> list[str]:
        return ["--env.task_name", "capitals", "--env.format_bonus", "0"]

    def reward(self, grade: float) -> float:
        config = self.config
        return reward(grade, correct_reward=config.correct_reward, incorrect_reward=config.incorrect_reward)


if __name__ == "__main__":
    InternBootcampEnv.cli()
