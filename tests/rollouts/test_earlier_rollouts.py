"""A run with more responses a problem takes those that an earlier run of the same problems has already."""

import json

import pytest

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling import one_by_one
from atroposlib.errors import ConfigError
from atroposlib.rollouts.journal import EarlierRollouts
from tests.fake_engine import running_engine
from tests.fakes import FakeTokenizer


class AskingEnv(BaseEnv):
    """Asks a real client for a group, in one turn or two."""

    name = "asking"
    turns = 1
    unscored = None  # the row without a score

    def load_tokenizer(self):
        return FakeTokenizer()

    async def setup(self):
        pass

    async def get_item(self, index):
        return {"number": index}

    async def collect_trajectories(self, item):
        messages = [{"role": "user", "content": f"number {item['number']}"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for _ in range(self.turns):
                reply = await managed.chat_completion(
                    messages=messages, n=self.config.group_size, max_tokens=32, temperature=self.temperature
                )
                texts = [choice.message.content for choice in reply.choices]
                messages = [*messages, {"role": "assistant", "content": texts[0]}, {"role": "user", "content": "more"}]
            nodes = managed.get_state()["nodes"][: self.config.group_size]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [None if i == self.unscored else float(i) for i in range(len(nodes))],
        }, []


async def run(engine, folder, size, *, reuse=None, temperature=1.0, turns=1, unscored=None):
    """Three groups of `size` responses; how many responses the engine was asked for."""
    engine.requests.clear()
    config = BaseEnvConfig(
        group_size=size,
        total_steps=3,
        rollouts_dir=str(folder),
        use_wandb=False,
        response_journal="responses",
        reuse_rollouts=str(reuse) if reuse else None,
    )
    server = APIServerConfig(server_type="sglang", model_name="fake", base_url=f"{engine.url}/v1")
    env = AskingEnv(config, [server])
    env.temperature, env.turns, env.unscored = temperature, turns, unscored
    await env.process_manager()
    await env.server.close()
    return sum(body["sampling_params"].get("n", 1) for _, body in engine.requests)


def records(folder):
    lines = [line for path in folder.glob("*_rollouts_*.jsonl") for line in path.read_text().splitlines()]
    return {record["item_key"]: record for record in map(json.loads, lines)}


@pytest.fixture
async def engine():
    async with running_engine() as started:
        yield started


async def test_only_the_missing_responses_are_generated(engine, tmp_path):
    assert await run(engine, tmp_path / "a", 4) == 12
    engine.text = "something else"
    assert await run(engine, tmp_path / "b", 6, reuse=tmp_path / "a") == 3 * 2
    earlier, later = records(tmp_path / "a"), records(tmp_path / "b")
    assert {key: record["tokens"][:4] for key, record in later.items()} == {
        key: record["tokens"] for key, record in earlier.items()
    }
    assert later["0"]["inference_logprobs"][:4] == earlier["0"]["inference_logprobs"]
    assert later["0"]["tokens"][4] != earlier["0"]["tokens"][0]
    assert (later["0"]["finish_reasons"], later["0"]["usage"]["prompt_tokens"]) == (
        ["stop"] * 6,
        earlier["0"]["usage"]["prompt_tokens"],
    )


async def test_a_response_without_a_score_is_generated_again_and_the_others_keep_their_places(engine, tmp_path):
    await run(engine, tmp_path / "a", 4, unscored=1)
    engine.text = "something else"
    assert await run(engine, tmp_path / "b", 4, reuse=tmp_path / "a") == 3
    earlier, later = records(tmp_path / "a")["0"]["tokens"], records(tmp_path / "b")["0"]["tokens"]
    assert [row in earlier for row in later] == [True, False, True, True]


async def test_other_sampling_parameters_and_longer_conversations_start_again(engine, tmp_path):
    await run(engine, tmp_path / "a", 2)
    assert await run(engine, tmp_path / "hotter", 2, reuse=tmp_path / "a", temperature=0.5) == 6
    await run(engine, tmp_path / "two", 2, turns=2)
    assert await run(engine, tmp_path / "again", 2, reuse=tmp_path / "two") == 3  # its second branches had one turn


async def test_a_folder_without_rollouts_is_refused(engine, tmp_path):
    with pytest.raises(ConfigError, match="holds no rollouts of an earlier run"):
        await run(engine, tmp_path / "b", 2, reuse=tmp_path)


async def test_where_a_file_of_the_earlier_run_is_gone_responses_are_generated(engine, tmp_path, monkeypatch, caplog):
    await run(engine, tmp_path / "a", 4)

    def opened_and_taken_away(folder):
        earlier = EarlierRollouts(folder)
        for path in folder.glob("*.jsonl"):
            path.unlink()
        return earlier

    monkeypatch.setattr(one_by_one, "EarlierRollouts", opened_and_taken_away)
    assert await run(engine, tmp_path / "b", 4, reuse=tmp_path / "a") == 12
    assert sorted(records(tmp_path / "b")) == ["0", "1", "2"]
    assert "not used again: the group of item 0" in caplog.text
