"""Scores of a reward model behind an address: protocols, failures; RLAIF with it, and DPO."""

import json
from collections import Counter

import pytest
from aiohttp import web
from typer.testing import CliRunner

from atroposlib.cli.dpo import app as dpo_gen
from atroposlib.environments import reward_model
from atroposlib.environments.reward_model import RewardModel, RewardModelConfig, number_of
from atroposlib.environments.rlaif_server import RLAIFConfig, RLAIFEnv
from atroposlib.environments.rows import write_rows
from atroposlib.errors import EngineFault, VerifierFault
from atroposlib.rollouts.failures import is_scored
from atroposlib.testing import roll_out
from tests.fakes import FakeTokenizer

CHATS = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in ("good", "bad", "odd")]
REPLIES = {
    "good": {"sglang": [{"embedding": [1.5]}], "vllm": {"data": [{"data": [1.5]}]}, "post": {"scores": [1.5]}},
    "bad": {"sglang": [{"embedding": [-2]}], "vllm": {"data": [{"data": [[9], [-2]]}]}, "post": {"reward": -2}},
    "odd": {"sglang": [{"embedding": []}], "vllm": {"data": []}, "post": {"scores": ["NaN"]}},
}
ROUTES = {"sglang": "/classify", "vllm": "/pooling", "post": "/score"}


@pytest.fixture
async def serve():
    """Start servers whose handler gives the reply to a request's path and body."""
    runners = []

    async def start(answer):
        async def handle(request):
            return answer(request.path, await request.json())

        app = web.Application()
        app.router.add_post("/{route}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def said_in(body):
    if "messages" in body:
        return body["messages"][0][-1]["content"]
    text = FakeTokenizer().decode((body.get("input_ids") or body["input"])[0])
    assert text.startswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    return text.rpartition("assistant\n")[2].removesuffix("<|im_end|>\n")


@pytest.mark.parametrize("kind", ROUTES)
async def test_each_protocol_gives_a_score_a_response_and_what_is_none_costs_itself(serve, kind):
    paths = []

    def answer(path, body):
        paths.append(path)
        return web.json_response(REPLIES[said_in(body)][kind])

    url = await serve(answer) + ("/score" if kind == "post" else "/v1")
    model = RewardModel(RewardModelConfig(base_url=url, server_type=kind, tokenizer_name="none"))
    model._tokenizer = FakeTokenizer()
    found = await model.scores(CHATS)
    assert (found[:2], is_scored(found[2])) == ([1.5, -2.0], False)
    assert (set(paths), model.counts) == ({ROUTES[kind]}, {"scored": 2, "failed": 1})


async def test_a_refusal_is_no_score_and_a_server_that_is_down_is_waited_for(serve, monkeypatch):
    monkeypatch.setattr(reward_model, "FIRST_PAUSE_S", 0.01)
    statuses = [503, 500, 400, 200]
    url = await serve(lambda path, body: web.json_response({"score": 0.5}, status=statuses.pop(0))) + "/score"
    model = RewardModel(RewardModelConfig(base_url=url, server_type="post"))
    (refused,) = await model.scores(CHATS[:1])
    assert (is_scored(refused), await model.scores(CHATS[:1])) == (False, [0.5])
    assert model.counts == {"waits": 2, "failed": 1, "scored": 1}
    gone = RewardModelConfig(base_url="http://127.0.0.1:1/score", server_type="post", outage_timeout_s=0.01)
    with pytest.raises(EngineFault, match="cannot connect"):
        await RewardModel(gone).scores(CHATS[:1])


def test_several_numbers_need_a_label_and_protocols_with_ids_a_tokenizer():
    assert number_of([{"embedding": [0.1, 0.9]}], label=1) == 0.9
    with pytest.raises(VerifierFault, match="2 numbers came; set `label`"):
        number_of([{"embedding": [0.1, 0.9]}])
    with pytest.raises(ValueError, match="needs tokenizer_name"):
        RewardModelConfig(base_url="http://rm")


async def test_a_reward_model_scores_the_replies_of_rlaif_in_its_own_unit(serve):
    url = await serve(lambda path, body: web.json_response(REPLIES[said_in(body)]["post"]))
    env = RLAIFEnv.__new__(RLAIFEnv)
    env.config = RLAIFConfig(reward_model={"base_url": url + "/score", "server_type": "post"})
    env.reward_model = RewardModel(env.config.reward_model)
    found = await env.grades(["good", "<think>hm</think>bad", "odd"], {"question": "q"})
    assert [env.reward(score) for score in found[:2]] == [1.5, -2.0]
    assert not is_scored(found[2])


def says(prompt):
    """Answer requests with good and bad in turns, request 2 with the same twice; as the judge, prefer good."""
    if "[answer A]" in prompt:
        first, second = (prompt.index(mark) for mark in ("[answer A]", "[answer B]"))
        is_good = ["good" in prompt[first:second], "good" in prompt[second:]]
        return "\\boxed{tie}" if is_good[0] == is_good[1] else "\\boxed{A}" if is_good[0] else "\\boxed{B}"
    return ["good", "good"] if "number 2." in prompt else ["bad", "good"]


def test_pairs_for_dpo_are_what_the_judge_preferred_and_ties_make_none(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", RLAIFEnv.sample_rows()[:10])
    size = ["--env.group_size", "2", "--env.ensure_scores_are_not_same", "false"]
    groups = roll_out(RLAIFEnv, says, tmp_path, groups=9, settings=["--env.dataset", rows, *size])
    assert Counter(tuple(group["scores"]) for group in groups) == {(-0.5, 0.5): 8, (0.0, 0.0): 1}
    assert {group["sampling"]["temperature"] for group in groups} == {1.0}  # of the replies, not of the judge
    pairs = tmp_path / "pairs.jsonl"
    given = [str(tmp_path / "rollouts.jsonl"), "--output", str(pairs), "--allow-negative-scores"]
    assert CliRunner().invoke(dpo_gen, given).exit_code == 0
    made = [json.loads(line) for line in pairs.read_text().splitlines()]
    assert [(pair["chosen"][-1]["content"], pair["rejected"][-1]["content"]) for pair in made] == [("good", "bad")] * 8
    asked = {pair["prompt"][-1]["content"] for pair in made}
    assert asked == {row["prompt"] for row in RLAIFEnv.sample_rows()[:9]} - {"Say something about the number 2."}
