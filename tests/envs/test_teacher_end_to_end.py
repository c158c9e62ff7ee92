"""A teacher's top-k log-probabilities, from the engine that gives them to the batch that a trainer gets."""

import httpx
import pytest

from atroposlib.environments.check import trajectory_api
from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.cli import main as run_environment
from atroposlib.envs.teacher_distillation_env import TeacherDistillationConfig, TeacherDistillationEnv
from atroposlib.testing import ScriptedEngine, write_tokenizer

RUN = {"wandb_group": "g", "wandb_project": "p", "batch_size": 2, "max_token_len": 512}
RUN |= {"checkpoint_dir": "", "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 10}


class TaughtEnv(TeacherDistillationEnv):
    """Scores replies by their length."""

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list]:
        return TeacherDistillationConfig(group_size=2, max_token_length=32), []

    async def setup(self):
        pass

    async def get_next_item(self):
        return {"question": "Say something."}

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            reply = await managed.chat_completion(
                messages=[{"role": "user", "content": item["question"]}], n=self.config.group_size, max_tokens=32
            )
            nodes = managed.get_state()["nodes"]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [float(len(choice.message.content)) for choice in reply.choices],
        }, []


def serve_taught(api, folder, top_k, groups=1):
    """Serve groups of two with the view of a teacher, through the environment's own command line."""
    tokenizer = write_tokenizer(folder / "tokenizer")
    teacher = {"server_type": "sglang", "model_name": "scripted", "tokenizer_name": str(tokenizer)}
    with (
        ScriptedEngine(lambda prompt: ["yes", "perhaps"], tokenizer) as student,
        ScriptedEngine(lambda prompt: "", tokenizer) as taught,
    ):
        teacher["base_url"] = f"{taught.url}/v1"
        flags = [text for name, value in teacher.items() for text in (f"--teacher.{name}", value)]
        limits = ["--env.total_groups", str(groups), "--env.rollout_server_url", api]
        limits += ["--env.max_batches_offpolicy", str(groups)]
        asked = ["--env.teacher_enabled", "true", "--env.teacher_top_k", str(top_k)]
        kept = ["--env.rollouts_dir", str(folder / "rollouts")]
        assert run_environment(TaughtEnv, ["serve", *student.flags, *flags, *limits, *asked, *kept]) == 0


@pytest.mark.parametrize("top_k", [0, 3])
def test_each_position_of_a_trainers_batch_has_what_the_teacher_said_of_it(tmp_path, top_k):
    with trajectory_api() as api:
        httpx.post(f"{api}/register", json=RUN).raise_for_status()
        httpx.get(f"{api}/batch").raise_for_status()  # the first asking starts the run
        serve_taught(api, tmp_path, top_k)
        (group,) = httpx.get(f"{api}/batch").json()["batch"]
    assert sorted(group["scores"]) == [3.0, 7.0]
    columns = [group[name] for name in ("tokens", "distill_token_ids", "distill_logprobs")]
    for tokens, ids, logprobs in zip(*columns, strict=True):
        assert (ids[0], logprobs[0]) == ([], [])  # nothing comes before the first
        assert ids[1:] == [[token + n for n in range(max(1, top_k))] for token in tokens[1:]]
        assert logprobs[1:] == [[-0.25, -2.0, -3.75][: max(1, top_k)]] * (len(tokens) - 1)
