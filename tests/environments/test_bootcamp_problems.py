from collections import Counter
from pathlib import Path

import pytest
from pydantic import ValidationError

from atroposlib.environments.intern_bootcamp.bootcamp_config import InternBootcampEnvConfig
from atroposlib.environments.intern_bootcamp.problems import SLOW_FAILURE_LIMIT, THINKING_PROMPT, ProblemSource
from atroposlib.environments.intern_bootcamp.seeds import Mixture, derive_seed
from atroposlib.errors import ConfigError, VerifierFault

CHECKOUT = str(Path(__file__).parent / "fake_checkout")


def make_source(**settings):
    return ProblemSource(InternBootcampEnvConfig(**settings))


def test_derived_seeds_are_the_same_everywhere_and_differ_by_part():
    assert derive_seed(1, "train", "addition", 7) == 14919044365881037787
    assert len({derive_seed(1, "a", index) for index in range(1000)}) == 1000


def test_a_mixture_draws_by_weight_and_index_alone():
    mixture = Mixture({"a": 3, "b": 1}, seed=0)
    drawn = [mixture.task_of(index) for index in range(4000)]
    assert drawn == [Mixture({"a": 3, "b": 1}, seed=0).task_of(index) for index in range(4000)]
    assert 2850 < Counter(drawn)["a"] < 3150


async def test_a_problem_depends_on_seed_and_index_alone():
    first, second = make_source(seed=5), make_source(seed=5)
    forwards = [await first.problem(index) for index in range(30)]
    backwards = [await second.problem(index) for index in reversed(range(30))]
    assert forwards == backwards[::-1]
    assert forwards != [await make_source(seed=6).problem(index) for index in range(30)]


async def test_evaluation_has_problems_of_its_own():
    source = make_source(task_name="addition", task_params={"largest": 10**9})
    train = {(await source.problem(index))[1]["raw_prompt"] for index in range(50)}
    assert not train & {(await source.problem(index, "eval"))[1]["raw_prompt"] for index in range(50)}


async def test_an_item_names_its_task_and_carries_what_its_verifier_needs():
    messages, meta = await make_source(task_name="capitals", require_reasoning=False).problem(0)
    word = meta["identity"]["word"]
    question = f'Write the word "{word}" in capital letters.\n\nPut your final answer in <answer>...</answer>.'
    assert messages == [{"role": "user", "content": question}]
    assert meta == {
        "task_name": "capitals",
        "raw_prompt": messages[0]["content"],
        "identity": {"word": word},
        "identity_format": "json",
        "demonstration": f"<answer>{word.upper()}</answer>",
    }


async def test_few_shot_turns_are_solved_problems_of_the_same_task_and_never_the_asked_one():
    source = make_source(task_name="addition", few_shot=3, require_reasoning=False)
    for index in range(60):
        messages, _ = await source.problem(index)
        assert [message["role"] for message in messages] == ["user", "assistant"] * 3 + ["user"]
        questions = [message["content"] for message in messages if message["role"] == "user"]
        assert len(set(questions)) == 4
        for question, answer in zip(messages[0:6:2], messages[1:6:2], strict=True):
            left, right = question["content"].removeprefix("What is ").removesuffix("?").split(" + ")
            total = int(left) + int(right)
            assert answer["content"] == f"{left} + {right} = {total}. <answer>{total}</answer>"


async def test_a_task_that_knows_no_right_answers_is_asked_without_few_shot_turns(caplog):
    source = make_source(task_name="Guessesbootcamp", few_shot=2, internbootcamp_path=CHECKOUT, system_prompt="")
    messages, _ = await source.problem(0)
    await source.close()
    assert [message["role"] for message in messages] == ["user"]
    assert "no few-shot turns: task Guessesbootcamp" in caplog.text


SYSTEM_PROMPTS = {
    "thinking by default": ({}, THINKING_PROMPT),
    "none without reasoning": ({"require_reasoning": False}, None),
    "one's own": ({"system_prompt": "Be brief."}, "Be brief."),
    "none when empty": ({"system_prompt": ""}, None),
}


@pytest.mark.parametrize(("settings", "prompt"), SYSTEM_PROMPTS.values(), ids=SYSTEM_PROMPTS)
async def test_system_prompt(settings, prompt):
    messages, _ = await make_source(**settings).problem(0)
    assert (messages[0]["content"] if messages[0]["role"] == "system" else None) == prompt


async def test_the_default_mixture_is_every_task_of_our_own_but_those_set_aside_or_every_class_of_a_checkout(tmp_path):
    assert set(make_source().tasks) == {
        "addition",
        "larger_of_two",
        "first_letter",
        "capitals",
        "sorting",
    }
    quarantine = tmp_path / "quarantine.json"
    quarantine.write_text('{"Hangsbootcamp": "no result after 10 s"}')
    classes = make_source(internbootcamp_path=CHECKOUT, quarantine_path=str(quarantine)).tasks
    assert "Dividesbootcamp" in classes
    assert "Hangsbootcamp" not in classes


async def test_parameters_of_a_mixture_go_by_task():
    source = make_source(
        task_weights={"addition": 1, "reasoning_gym:chain_sum": 1},
        task_params={"addition": {"largest": 10**5}, "reasoning_gym:chain_sum": {"max_terms": 2}},
    )
    problems = [await source.problem(index) for index in range(12)]
    await source.close()
    assert {meta["task_name"] for _, meta in problems} == {"addition", "reasoning_gym:chain_sum"}
    assert max(meta["identity"]["left"] for _, meta in problems if meta["task_name"] == "addition") > 9


async def test_a_failing_generator_gives_items_with_the_reason():
    source = make_source(task_name="Raisesonimportbootcamp", internbootcamp_path=CHECKOUT)
    items = [await source.problem(index) for index in range(SLOW_FAILURE_LIMIT + 2)]
    await source.close()
    assert [messages for messages, _ in items] == [[]] * len(items)
    assert {meta["task_name"] for _, meta in items} == {"Raisesonimportbootcamp"}
    assert all("a_package_that_nobody_has" in meta["fault"] for _, meta in items)


async def test_a_hanging_generator_is_soon_not_run_any_more():
    source = make_source(task_name="Hangsbootcamp", internbootcamp_path=CHECKOUT, verifier_timeout_s=0.2)
    faults = [(await source.problem(index))[1]["fault"] for index in range(SLOW_FAILURE_LIMIT + 1)]
    await source.close()
    assert all("no result after 0.2 s" in fault for fault in faults[:-1])
    assert "took too long 3 times in a row" in faults[-1]


async def test_a_misspelt_dataset_is_refused_at_the_start():
    source = make_source(task_weights={"addition": 1, "reasoning_gym:chain_sums": 1})
    with pytest.raises(ConfigError, match=r"reasoning_gym:chain_sums.*not registered"):
        await source.check()
    await source.close()


async def test_an_item_of_a_task_that_is_not_configured_any_more_has_no_score():
    _, meta = await make_source(task_name="addition").problem(0)
    with pytest.raises(VerifierFault, match="'addition'"):
        await make_source(task_name="capitals").verify("<answer>1</answer>", meta)


REFUSED = {
    "weights without a mixture": ({"task_name": "addition", "task_weights": {"addition": 1}}, "drop one of both"),
    "no task at all": ({"task_weights": {}}, "name at least one task"),
    "a weight of zero": ({"task_weights": {"addition": 0}}, "greater than 0"),
    "parameters of another task": ({"task_params": {"adition": {}}}, "adition"),
    "an unknown task": ({"task_weights": {"adition": 1}}, "did you mean 'addition'"),
    "no checkout there": ({"internbootcamp_path": "/nowhere"}, "not a checkout of InternBootcamp"),
    "no quarantine list there": ({"quarantine_path": "/nowhere.json"}, "quarantine_path /nowhere.json cannot be read"),
    "an unset variable": ({"internbootcamp_path": "${NO_SUCH_VARIABLE}/x"}, "NO_SUCH_VARIABLE"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises((ConfigError, ValidationError, ValueError), match=message):
        make_source(**settings)
