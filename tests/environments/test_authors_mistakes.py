"""Mistakes that authors of environments make at first: each is a sentence that says what to do."""

import pytest

from atroposlib.environments.multi_turn import Player, Step
from atroposlib.environments.single_turn import SingleTurnConfig, SingleTurnEnv, as_number, local_engine
from atroposlib.envs.cli import defaults_of, main
from atroposlib.errors import ConfigError, EnvironmentFault
from atroposlib.rollouts.failures import place_of
from atroposlib.rollouts.source import of_hook
from atroposlib.testing import ScriptedEngine, write_tokenizer


class Sums(SingleTurnEnv):
    """Sums of two numbers."""

    name = "sums"

    @classmethod
    def config_init(cls):
        return SingleTurnConfig(group_size=4, max_token_length=64, use_wandb=False), local_engine()

    def make(self, rng, level):
        return {"left": rng.randint(1, 9), "right": 1}

    def question(self, item):
        return f"{item['left']} + {item['right']}?"

    def grade(self, said, item):
        return float(said == str(item["left"] + item["right"]))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    def answer(prompt):
        return ["7", "no idea", "", "8"]

    with ScriptedEngine(answer, write_tokenizer(tmp_path_factory.mktemp("engine") / "tokenizer")) as engine:
        yield engine


async def waits(self, *words):
    return 1.0


MISTAKES = {
    "a score that is text": (
        "grade",
        lambda self, said, item: "1.0",
        "TypeError: grade returned '1.0'; it must return",
    ),
    "no return": ("grade", lambda self, said, item: None, "TypeError: grade returned None; it must return a number"),
    "a grade that is awaited": ("grade", waits, "it is called, not awaited: write it as `def`"),
    "a question without return": ("question", lambda self, item: None, "question(item) returned None; it must return"),
    "a question that is awaited": ("question", waits, "it must return the problem as text"),
    "a column of another name": ("question", lambda self, item: item["quetion"], "KeyError: 'quetion'"),
    "no items": ("make", lambda self, rng, level: None, "sums has no items: get_item(0) returned None"),
    "a plain setup": (
        "setup",
        lambda self: None,
        "setup returned None and no coroutine; write it as `async def setup`",
    ),
    "plain messages": ("messages", lambda self, item: [], "write it as `async def messages`"),
}


@pytest.mark.parametrize(("hook", "wrong", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_the_run_with_a_sentence(hook, wrong, said, engine, tmp_path, capsys):
    env_cls = type("Wrong", (Sums,), {hook: wrong, "__doc__": "Sums."})
    code = main(env_cls, ["process", *engine.flags, "--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")])
    assert code == 1
    ended = capsys.readouterr().err.splitlines()[-1]
    assert ended.startswith("error: ")
    assert said in ended


async def test_a_grade_that_raises_for_one_reply_costs_that_reply_alone():
    env_cls = type("Sometimes", (Sums,), {"grade": lambda self, said, item: float(int(said) > 7)})
    env = env_cls.__new__(env_cls)
    found = await env.grades(["7", "no idea", "", "8"], {})
    assert [found[0], *found[2:]] == [0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="no idea"):
        bool(found[1])
    with pytest.raises(EnvironmentFault, match=r"ValueError: .*no idea") as raised:
        await env.grades(["no idea", ""], {})
    assert place_of(raised.value).startswith(" at test_authors_mistakes.py:")


SETTINGS = {
    "no classmethod": (lambda cls: None, "@classmethod is missing"),
    "settings alone": (classmethod(lambda cls: SingleTurnConfig()), "it returned SingleTurnConfig"),
    "nothing": (classmethod(lambda cls: None), "it returned None"),
}


@pytest.mark.parametrize(("wrong", "said"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_are_none_are_refused(wrong, said):
    with pytest.raises(ConfigError, match="a @classmethod that returns .*" + said):
        defaults_of(type("Wrong", (Sums,), {"config_init": wrong}))


async def test_a_hook_is_awaited_or_said_to_be_no_coroutine():
    async def hook(value):
        return value

    assert await of_hook(hook(3), "get_item") == 3
    with pytest.raises(EnvironmentFault, match=r"get_item gave <coroutine.*a function that it calls is `async def`"):
        await of_hook(hook(hook(3)), "get_item")
    with pytest.raises(
        EnvironmentFault, match="get_item returned 3 and no coroutine; write it as `async def get_item`"
    ):
        await of_hook(3, "get_item")  # pyright: ignore[reportArgumentType]


def test_a_turn_that_is_no_step_and_a_reward_that_is_no_number_are_named():
    player = Player(ask=None, config=None, rewards=[0.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"step\(reply\) returned None; it must return a Step"):
        player.take(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"the reward of step\(reply\) returned '1'; it must return a number"):
        player.take(Step("go on", reward="1"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="None is no observation"):
        player.hear(None)  # pyright: ignore[reportArgumentType]
    assert as_number(True, "grade") == 1.0
