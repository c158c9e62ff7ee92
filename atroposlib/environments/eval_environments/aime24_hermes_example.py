"""AIME 2024 as an `EvalBase`: an evaluation that needs no environment.

python environments/eval_environments/aime24_hermes_example.py --server-url http://localhost:9001 --model-name my-model
"""

import asyncio
from typing import Any

from atroposlib.environments.eval_environments.eval_helpers import HERMES_REASONING_PROMPT
from atroposlib.environments.rows import load_items
from atroposlib.envs.eval import EvalBase, eval_runner, pass_at_k
from atroposlib.envs.reward_fns.math_judge import MathJudge, scores
from atroposlib.envs.server_handling.server_manager import ServerManager


class AIME24(EvalBase):
    """Share of problems that are answered with the right whole number in \\boxed{}.

    Keyword arguments: `dataset` (a .jsonl or .parquet file with problem and answer, or a name on the model hub),
    `use_system_prompt` (ask for thoughts in <think> and </think>).
    """

    dataset: str = "HuggingFaceH4/aime_2024"
    use_system_prompt: bool = True

    def setup_data(self) -> list[Any]:
        self.judge = MathJudge()
        return load_items(
            self.dataset,
            lambda row: {"problem": row["problem"], "answer": str(row["answer"])},
            wanted="problem and answer",
        )

    async def run_item(self, server: ServerManager, data_item: Any) -> tuple[dict[str, float], Any]:
        system = [{"role": "system", "content": HERMES_REASONING_PROMPT}] if self.use_system_prompt else []
        asked = f"{data_item['problem']}\n\nGive the final answer, a whole number, in \\boxed{{}}."
        messages = [*system, {"role": "user", "content": asked}]
        reply = await self.chat_completion(server, messages)
        said = [choice.message.content or "" for choice in reply.choices]
        grades = scores(await self.judge.judge_async(said, data_item["answer"]))
        right = sum(grade >= 1 for grade in grades)
        metrics = {"accuracy": right / len(grades)}
        metrics[f"pass@{self.pass_at_n}"] = pass_at_k(len(grades), right, self.pass_at_n)
        return metrics, {"messages": messages, "responses": said, "answer": data_item["answer"], "grades": grades}


if __name__ == "__main__":
    asyncio.run(eval_runner(AIME24()))
