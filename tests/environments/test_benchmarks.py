"""The table of benchmarks: their rows, classes and scores; judges; results."""

import importlib
import json

import pytest

from atroposlib.environments.eval_environments.benchmark import BenchmarkEnv, benchmarks, f1, of_table, plain
from atroposlib.environments.eval_environments.results import compare, table
from atroposlib.environments.judging import Grader, PairJudge
from atroposlib.environments.rlaif_server import RLAIFConfig, RLAIFEnv
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ConfigError, DataError, VerifierFault
from atroposlib.rollouts.failures import is_scored
from atroposlib.utils.eval_statistics import paired_test, standard_error
from tests.fakes import FakeServer, FakeTokenizer

ROWS = {  # a row as the set has it, and another right reply
    "mmlu": ({"question": "q?", "choices": ["x", "y", "z", "w"], "answer": 1, "subject": "s"}, "B"),
    "mmlu_pro": ({"question": "q?", "options": ["x", "y", "z"], "answer": "B", "answer_index": 1}, "(B)"),
    "gpqa": (
        {"Question": "q?", "Correct Answer": "y", "Incorrect Answer 1": "x", "Incorrect Answer 2": "z"}
        | {"Incorrect Answer 3": "w"},
        "y",
    ),
    "arc": ({"id": "1", "question": "q?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}, "y"),
    "hellaswag": (
        {"activity_label": "A", "ctx_a": "He runs.", "ctx_b": "he", "ctx": "q", "endings": ["x", "y"], "label": "1"},
        "B",
    ),
    "boolq": ({"question": "is it", "passage": "p", "answer": True}, "yes"),
    "piqa": ({"goal": "q?", "sol1": "x", "sol2": "y", "label": 1}, "y"),
    "siqa": ({"context": "c.", "question": "q?", "answerA": "x", "answerB": "y", "answerC": "z", "label": "2"}, "B"),
    "winogrande": ({"sentence": "The _ ran.", "option1": "x", "option2": "y", "answer": "2"}, "y"),
    "obqa": ({"question_stem": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}, "B"),
    "agieval": ({"query": "q?", "choices": ["(A)x", "(B)y"], "gold": [1]}, "B"),
    "musr": ({"narrative": "n", "question": "q?", "choices": "['x', 'y']", "answer_index": 1}, "B"),
    "pubmedqa": ({"context": "c", "question": "q?", "final_decision": "no"}, "no"),
    "gsm8k": ({"question": "q?", "answer": "so #### 1,234"}, "#### 1234"),
    "math500": ({"problem": "q?", "answer": "42", "solution": "s"}, "\\boxed{42.0}"),
    "math": ({"problem": "q?", "solution": "so \\boxed{42}"}, "\\boxed{42}"),
    "aime": ({"problem": "q?", "answer": 42}, "\\boxed{042}"),
    "aimo": ({"problem": "q?", "answer": "42"}, "\\boxed{42}"),
    "olympiadbench": ({"question": "q?", "final_answer": ["42"]}, "\\boxed{42}"),
    "bbh": ({"input": "q?", "target": "(B)"}, "<answer>b</answer>"),
    "drop": ({"passage": "p", "question": "q?", "answers_spans": {"spans": ["the tower"]}}, "Tower."),
    "ifeval": ({"prompt": "q", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"n": None}]}, "no commas"),
    "simpleqa": ({"problem": "q?", "answer": "Paris"}, "Paris"),
    "hle": ({"question": "q?", "answer": "Paris"}, "Paris"),
}


@pytest.fixture
async def make_env(tmp_path):
    made = []

    async def make(name, rows, script="\\boxed{correct}", server=FakeServer, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        env_cls, config_cls = of_table(name)
        local = type(env_cls.__name__, (env_cls,), {"load_tokenizer": lambda self: FakeTokenizer()})
        config = config_cls(benchmark=name, dataset=str(path), use_wandb=False, **settings)
        env = local(config, [APIServerConfig(base_url="http://fake/v1")])
        env.server.servers = [server(script)]
        made.append(env)
        await env.setup()
        return env

    yield make
    for env in made:
        await env.teardown()


def test_every_benchmark_has_a_row_to_try_and_a_class_where_others_import_it():
    assert ROWS.keys() == benchmarks().keys()
    for name, row in benchmarks().items():
        found = getattr(importlib.import_module(f"atroposlib.environments.eval_environments.{row.module}"), row.cls)
        assert issubclass(found, BenchmarkEnv)
        assert found.config_init()[0].benchmark == name


@pytest.mark.parametrize("name", ROWS)
async def test_a_right_reply_scores_and_another_does_not(make_env, name):
    row, reply = ROWS[name]
    env = await make_env(name, [row], script="\\boxed{correct}")
    item = await env.problem("test", 0)
    right = [said for said in (env.gold(item), reply) if said]
    assert await env.grades(right, item) == [1.0] * len(right)
    env.server.servers[0].script = "\\boxed{incorrect}"
    assert await env.grades(["<answer>u</answer>, or", "", f"<think>{reply}"], item) == [0.0] * 3


class Likely(FakeServer):
    """Finds a text the likelier the more often it says y."""

    async def get_logprobs(self, **kwargs):
        ids = kwargs["input_ids"]
        self.requests.append(self.tokenizer.decode(ids))
        return {"prompt_logprobs": [None, *(-0.1 if token == ord("y") else -1.0 for token in ids[1:])]}


async def test_choices_are_compared_by_their_likelihood_and_by_that_of_a_character(make_env, tmp_path):
    rows = [{"question": "q?", "choices": {"text": ["z", "yy z y"], "label": ["A", "B"]}, "answerKey": "B"}] * 2
    env = await make_env(
        "arc", rows, server=Likely, scoring="loglikelihood", data_dir_to_save_evals=str(tmp_path / "result")
    )
    await env.evaluate()
    assert sorted(set(env.server.servers[0].requests)) == ["Question: q?\nAnswer: yy z y", "Question: q?\nAnswer: z"]
    samples = [json.loads(line) for line in (tmp_path / "result/samples.jsonl").read_text().splitlines()]
    assert samples[0]["loglikelihoods"] == pytest.approx([-2.0, -4.3])
    assert (env.eval_metrics["eval/acc"], env.eval_metrics["eval/acc_norm"]) == (0.0, 1.0)


async def test_letters_follow_the_listed_choices_and_solved_questions_stand_before(make_env):
    rows = [{"question": f"q{n}?", "choices": ["x", "y"], "answer": 1} for n in range(3)]
    env = await make_env("mmlu", rows, server=Likely, scoring="loglikelihood", few_shot=1)
    shown, (context, text) = (
        "q1?\nA. x\nB. y\nAnswer: B\n\n",
        (await env.continuations(await env.problem("test", 0)))[0],
    )
    assert (context, text) == (f"{shown}q0?\nA. x\nB. y\nAnswer:", " A")


async def test_where_a_choice_stands_inside_a_sentence_what_follows_is_scored(make_env):
    env = await make_env("winogrande", [ROWS["winogrande"][0]], server=Likely, scoring="loglikelihood")
    pairs = await env.continuations(await env.problem("test", 0))
    assert pairs == [("The x", " ran."), ("The y", " ran.")]


def test_what_has_no_choices_is_not_scored_by_likelihood():
    with pytest.raises(ValueError, match="gsm8k has no choices"):
        of_table("gsm8k")[1](benchmark="gsm8k", scoring="loglikelihood")
    with pytest.raises(ConfigError, match="there is no benchmark 'nothing'"):
        of_table("nothing")


def test_words_are_compared_without_articles_and_punctuation():
    assert plain("The  Eiffel-Tower!") == "eiffeltower"
    assert [f1("a tower", "the tower"), f1("", "x"), f1("x y", "y z")] == [1.0, 0.0, 0.5]


def judge_of(kind, script):
    manager = ServerManager([APIServerConfig(base_url="http://fake/v1", health_check=False)])
    manager.servers = [FakeServer(script)]
    return kind(manager)


def first_wins(prompt):
    return "\\boxed{A}"


def good_wins(prompt):
    return "\\boxed{A}" if prompt.index("good") < prompt.index("bad") else "\\boxed{\\text{B}}"


PAIRS = {
    "the better one": (good_wins, 1.0, {"pairs": 1}),
    "always the first place": (first_wins, 0.5, {"pairs": 1, "changed with the order": 1}),
    "a tie": (lambda prompt: "\\boxed{tie}", 0.5, {"pairs": 1}),
}


@pytest.mark.parametrize(("script", "expected", "counts"), PAIRS.values(), ids=PAIRS)
async def test_a_pair_is_judged_in_both_orders(script, expected, counts):
    judge = judge_of(PairJudge, script)
    assert await judge.prefer("q", "good", "bad") == expected
    assert +judge.counts == counts


async def test_what_a_judge_says_that_cannot_be_read_is_counted_and_no_preference():
    judge = judge_of(PairJudge, "<think>\\boxed{A}")
    with pytest.raises(VerifierFault, match="in either order"):
        await judge.prefer("q", "good", "bad")
    assert judge.counts["unread"] == 2
    grader = judge_of(Grader, "hm")
    assert not is_scored(await grader.grade("q", "x", "y"))
    assert await grader.grade("q", "", "y") == 0.0
    assert +grader.counts == {"unread": 1, "not attempted": 1}


def test_standard_errors_are_those_of_the_sample():
    assert standard_error([0, 1, 1, 1]) == pytest.approx(0.25)
    assert standard_error([1.0]) == 0.0


def test_a_paired_test_tries_all_signs_of_few_differences_and_draws_those_of_many():
    found = paired_test([0, 0, 0, 1, 1], [1, 1, 1, 1, 1])
    assert (found.difference, found.p_value, found.better, found.worse) == (pytest.approx(0.6), 0.25, 3, 0)
    assert paired_test([0] * 30, [1] * 30).p_value < 0.001
    assert paired_test([1, 2], [1, 2]).p_value == 1.0
    with pytest.raises(ValueError, match="found 1 and 2"):
        paired_test([1], [1, 2])


def write_result(folder, grades):
    folder.mkdir()
    facts = {"config_general": {"model_name": "m"}, "results": {"all": {"eval/acc": 0.5, "eval/acc_stderr": 0.1}}}
    (folder / "metrics.json").write_text(json.dumps(facts))
    lines = [json.dumps({"item": {"q": number}, "grades": [grade]}) for number, grade in enumerate(grades)]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_results_are_shown_and_compared_item_by_item(tmp_path):
    first, second = write_result(tmp_path / "a", [0, 0, 1]), write_result(tmp_path / "b", [1, 1, 1, 0])
    assert f"| {first} | m | eval/acc | 0.5000 | ± 0.1000 |" in table([first, second])
    assert compare(first, second)[:1] + compare(first, second)[3:] == (pytest.approx(2 / 3), 3, 2, 0)
    with pytest.raises(ConfigError, match="cannot be read"):
        table([str(tmp_path / "none")])
    (tmp_path / "b" / "samples.jsonl").write_text('{"item": {"q": 9}, "grades": [1]}\n')
    with pytest.raises(DataError, match="no item in common"):
        compare(first, second)


async def test_replies_of_a_group_are_compared_in_a_ring_or_all_with_all():
    for all_pairs, expected in ((False, [1.0, 0.25, 0.75, 0.0]), (True, [1.0, 0.5, 0.5, 0.0])):
        env = RLAIFEnv.__new__(RLAIFEnv)
        env.config = RLAIFConfig(all_pairs=all_pairs)
        env.judge = judge_of(PairJudge, lambda prompt: "\\boxed{tie}")
        better = {"a": 3, "b": 2, "c": 2, "d": 1}

        async def prefer(question, one, other, better=better):
            return 0.5 + 0.5 * ((better[one] > better[other]) - (better[one] < better[other]))

        env.judge.prefer = prefer
        assert await env.grades(list("abcd"), {"question": "q"}) == pytest.approx(expected)
        assert env.reward(0.75) == 0.25


async def test_a_reply_that_no_judgement_could_be_read_of_has_no_score():
    env = RLAIFEnv.__new__(RLAIFEnv)
    env.config, env.judge = RLAIFConfig(), judge_of(PairJudge, "hm")
    assert [is_scored(grade) for grade in await env.grades(["a", "b"], {"question": "q"})] == [False, False]
