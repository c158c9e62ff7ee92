"""Customers of a shop: the rules that are broken are named, whoever plays the customer."""

import random
from collections import Counter

import pytest
from fakes import FakeServer

from atroposlib.environments.customer_service.cases import KINDS, RULES, make_case
from atroposlib.environments.customer_service.shop import Shop, run
from atroposlib.environments.customer_service_env import CustomerServiceEnv, right_replies
from atroposlib.environments.policies import scripted
from atroposlib.environments.tool_calling_server import written
from atroposlib.rollouts.trace import tracing
from tests.environments.test_multi_turn import make_env


def case_of(kind):
    return make_case(random.Random(3), [kind], 1)


def call(name, /, **arguments):
    return written([{"name": name, "arguments": arguments}])


def look(case):
    return [call("find_customer", email=case["email"]), call("get_order", order=case["order"])]


def change(case):
    ((name, arguments),) = case["calls"]
    return call(name, **arguments)


OFFER, YES_SAID = "I can do that. Shall I?", "It is done: {told}."
COURSES = {
    "right": ("cancel", lambda c: [*look(c), OFFER, change(c), YES_SAID], []),
    "without a question": ("cancel", lambda c: [*look(c), change(c), YES_SAID], ["confirmed"]),
    "the sum is not said": ("cancel", lambda c: [*look(c), OFFER, change(c), "Done.", "Done.", "Done."], ["told"]),
    "without a look": ("cancel", lambda c: [OFFER, change(c), YES_SAID], ["looked_up"]),
    "only promised": ("cancel", lambda c: [*look(c), OFFER, YES_SAID], ["state"]),
    "against the rules": (
        "cancel_late",
        lambda c: [*look(c), OFFER, call("cancel_order", order=c["order"]), "That is not possible, but done."],
        ["state", "allowed"],
    ),
    "a return that comes late": (
        "return_late",
        lambda c: [*look(c), "I am sorry, this is not possible after 30 days."],
        [],
    ),
    "refused without a look": ("return_late", lambda c: ["That is not possible."], ["looked_up"]),
    "handed over to have peace": (
        "address_late",
        lambda c: [*look(c), call("hand_over", summary="x"), "I cannot do that."],
        ["state"],
    ),
    "all states, to be safe": (
        "status",
        lambda c: [*look(c), *["It is delivered, cancelled, processing or shipped."] * 3],
        ["told"],
    ),
    "a stranger is told": (
        "stranger",
        lambda c: [*look(c), "I cannot do that, it is the order of {owner}."],
        ["private"],
    ),
    "a stranger is not told": ("stranger", lambda c: [*look(c), "I am sorry, I cannot do that for you."], []),
    "handed over": ("other", lambda c: [call("hand_over", summary="x"), "A colleague takes over."], []),
    "nothing that helps": ("return", lambda c: ["Well."] * 3, ["state", "told", "looked_up"]),
}


@pytest.mark.parametrize(("kind", "said", "failed"), COURSES.values(), ids=COURSES)
async def test_the_rules_that_an_episode_breaks_are_named(kind, said, failed):
    env, case = make_env(CustomerServiceEnv, ""), case_of(kind)
    await env.setup()
    words = {"told": (case["told"] or [""])[0], "owner": case["db"]["orders"][case["order"]]["customer"]}
    texts = (text if text.startswith("<tool_call>") else text.format(**words) for text in said(case))
    replies = (text for text in texts)
    player = await scripted(env, case, lambda world, player: next(replies))
    assert (player.facts()["failed_rules"], player.score, player.end) == (failed, float(not failed), "over")


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_case_can_be_solved_and_its_first_words_alone_solve_none(kind):
    env = make_env(CustomerServiceEnv, "", kinds=[kind], levels=[1, 4])
    await env.setup()
    items = [await env.problem("train", index) for index in range(12)]
    for policy, score in ((lambda world, player: world.gold(), 1.0), (lambda world, player: "No.", 0.0)):
        assert {(await scripted(env, item, policy)).score for item in items} == {score}


def test_the_expected_database_differs_only_where_something_is_to_be_done():
    cases = [make_case(random.Random(n), KINDS, 2) for n in range(60)]
    changed = Counter(case["kind"] for case in cases if case["db"] != case["expected"])
    assert set(changed) == {"cancel", "return", "address", "other"}
    assert all(case["calls"] for case in cases if case["kind"] in changed)


REFUSED = {
    "a tool that is not there": ("_changed", {"tool": "x", "order": "y"}, "Error: there is no tool _changed"),
    "an argument that is none": ("get_order", {"number": "1"}, "Error: "),
    "a number": ("get_order", {"order": 1}, "Error: the arguments must be a JSON object of texts"),
    "an order that is not there": ("cancel_order", {"order": "N1"}, "Error: there is no order N1"),
    "no JSON": ("get_order", None, "Error: the arguments must be"),
}


@pytest.mark.parametrize(("name", "arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_calls_that_cannot_be_done_say_why_and_change_nothing(name, arguments, said):
    case = case_of("cancel")
    shop = Shop(case["db"])
    assert run(shop, name, arguments).startswith(said)
    assert (shop._changes, case["db"]) == ([], case_of("cancel")["db"])


async def test_a_model_plays_the_customer_and_its_words_are_not_trained():
    case = case_of("cancel")
    env = make_env(CustomerServiceEnv, "", customer="model", group_size=1)
    service = iter(right_replies(case)[-4:])
    customer = iter(["Yes, please.", "<think>Good.</think>###"])
    asked = []

    class Both(FakeServer):
        async def chat_completion(self, **kwargs):
            asked.append(kwargs["messages"])
            self.script = next(customer)
            return await super().chat_completion(**kwargs)

        async def tokens_and_logprobs_completion(self, **kwargs):
            self.script = next(service)
            return await super().tokens_and_logprobs_completion(**kwargs)

    env.server.servers = [Both(tokenizer=env.server.servers[0].tokenizer)]
    await env.setup()
    with tracing() as trace:
        row, _ = await env.collect_trajectory(case)
    assert trace.replies == len(right_replies(case)[-4:])  # the record is of the model that is trained
    assert (row["scores"], row["overrides"]["failed_rules"], row["overrides"]["turns"]) == (1.0, [], 4)
    assert case["wish"] in asked[0][0]["content"]
    assert [message["role"] for message in asked[1]] == ["system", "user", "assistant", "user", "assistant", "user"]
    trained = bytes(token for token in row["masks"] if 0 <= token < 256).decode()
    assert "Yes, please." not in trained


async def test_an_evaluation_and_the_log_count_broken_rules(tmp_path, monkeypatch):
    logged = {}
    env = make_env(CustomerServiceEnv, "That is not possible.", eval_problems=4, data_dir_to_save_evals=str(tmp_path))
    await env.setup()
    await env.evaluate()
    assert set(RULES) == {name.removeprefix("eval/failed_") for name in env.eval_metrics if "eval/failed_" in name}
    assert env.eval_metrics["eval/failed_looked_up"] > 0.5
    monkeypatch.setattr("atroposlib.envs.base.BaseEnv.wandb_log", lambda self, metrics: noted(logged, metrics))
    await env.collect_trajectory(case_of("return_late"))
    await env.wandb_log()
    assert (logged["train/failed_looked_up"], "train/failed_state" in logged) == (1.0, False)


async def noted(logged, metrics):
    logged.update(metrics)
