"""The table of benchmarks: their rows, classes and scores; judges; results."""

import asyncio
import importlib
import json
import os
import re
import signal
from typing import Any

import pytest

from atroposlib.environments.eval_environments.aime24_hermes_example import AIME24
from atroposlib.environments.eval_environments.benchmark import BenchmarkEnv, load_class, of_table
from atroposlib.environments.eval_environments.expression_distance import Tree, distance_score, edit_distance
from atroposlib.environments.eval_environments.judgemark_eval import JudgeMarkEvalEnv
from atroposlib.environments.eval_environments.kinds import F1, Aliases, Kind, benchmarks, f1, plain
from atroposlib.environments.eval_environments.results import compare, table
from atroposlib.environments.judging import Judge
from atroposlib.environments.rlaif_server import RLAIFConfig, RLAIFEnv
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.cli import main as run_environment
from atroposlib.envs.cli import resolve
from atroposlib.envs.eval import kept_responses
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ConfigError, DataError, EnvironmentFault, VerifierFault
from atroposlib.rollouts.failures import is_scored
from atroposlib.testing import ScriptedEngine, write_tokenizer
from atroposlib.utils.eval_statistics import paired_test, standard_error
from tests.children import Child
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
    "triviaqa": ({"question": "q", "answer": {"aliases": ["AC/DC", "The Band"], "value": "AC/DC"}}, "Ac-Dc."),
    "simpleqa": ({"problem": "q?", "answer": "Paris"}, "Paris"),
    "hle": ({"question": "q?", "answer": "Paris"}, "Paris"),
    "phybench": ({"content": "q?", "answer": "$$v = 2 g h$$", "tag": "MECHANICS"}, "\\boxed{v = 2 h g}"),
    "arc_agi": (
        {
            "fewshots": [{"input": [[1]], "output": [[2]]}],
            "question": [{"input": [[1, 1]], "output": [[2, 2]]}],
        },
        "The input was [[1, 1]], so the output is\n[[2,2]]",
    ),
    "mixeval": ({"prompt": "q?", "options": ["x", "y"], "target": ["1"], "context": None}, "B"),
    "arena_hard": ({"uid": "1", "prompt": "q?", "answer": "theirs", "category": "c"}, "ours"),
    "mtbench": ({"turns": ["q?"], "category": "c", "reference": []}, "fine"),
    "refusalbench": ({"prompt": "q?", "overarching_category": "c"}, "Sure."),
    "pairwise_judgement": ({"prompt": "q?", "chosen": ["y"], "rejected": ["x", "z", "w"], "subset": "Math"}, "y"),
}
JUDGES = {  # what a judge says of a right reply, and of a wrong one
    "arena_hard": (
        lambda prompt: "\\boxed{A}" if prompt.index("ours") < prompt.index("theirs") else "\\boxed{B}",
        lambda prompt: "\\boxed{A}" if prompt.index("theirs") < prompt.index("u</answer>") else "\\boxed{B}",
    ),
    "mtbench": ("\\boxed{10}", "\\boxed{1}"),
    "refusalbench": ("\\boxed{helps}", "\\boxed{refuses}"),
}


@pytest.fixture
async def make_env(tmp_path):
    made = []

    async def make(name, rows, script="\\boxed{correct}", server=FakeServer, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        env_cls = load_class(name)
        config_cls: Any = env_cls.env_config_cls
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
    assert [*ROWS, "judgemark"] == [*benchmarks()]
    for name, row in benchmarks().items():
        found = getattr(importlib.import_module(f"atroposlib.environments.eval_environments.{row.module}"), row.cls)
        assert issubclass(found, BenchmarkEnv)
        assert found.config_init()[0].benchmark == name


IN_WORDS = {  # target, reply, grade
    "a letter in brackets": ("(A)", "A.", 1.0),
    "no letter": ("(A)", "the", 0.0),
    "marks alone": ("(A)", "...", 0.0),
    "brackets that are the answer": ("] >", "]>", 1.0),
    "other brackets": ("] >", "> ]", 0.0),
    "a sign": ("-50", "50", 0.0),
    "a point": ("1.5", "15", 0.0),
    "another spelling of a number": ("1200", "1,200.0", 1.0),
    "a word with an article": ("valid", "The valid.", 1.0),
}


@pytest.mark.parametrize(("target", "said", "grade"), IN_WORDS.values(), ids=IN_WORDS)
def test_words_are_compared_without_losing_signs_points_and_brackets(target, said, grade):
    assert Kind(benchmarks()["bbh"], "0").grade(said, {"answer": target}) == grade


OF_TRIVIAQA = {  # names of the right answer, reply, grade; as TriviaQA's script, but for names of articles or marks
    "another name": (["Sunset Blvd", "Sunset Boulevard"], "The sunset boulevard.", 1.0),
    "a mark between words": (["AC/DC"], "AC DC", 1.0),
    "a mark lost": (["AC/DC"], "ACDC", 0.0),
    "quotes of print": (["Rosie\u2019s"], "rosie's", 1.0),
    "an underscore": (["Val_Kilmer"], "Val Kilmer", 1.0),
    "two answers": (["Paris", "Lutetia"], "Paris, London", 0.0),
    "two names": (["Paris", "Lutetia"], "Paris Lutetia", 0.0),
    "a sentence": (["Paris"], "It is Paris", 0.0),
    "the answer and its negation": (["Paris"], "not Paris", 0.0),
    "in tags, after a sentence": (["Paris"], "It is that. <answer>Paris</answer>", 1.0),
    "an article, where the name is more": (["The The"], "the", 0.0),
    "the name of articles": (["The The"], '"the  The"', 1.0),
    "marks, where the name is words": (["Paris"], "?!", 0.0),
    "another mark": (["!!!"], "?", 0.0),
    "a name of marks": (["!!!"], "!!!", 1.0),
}


@pytest.mark.parametrize(("names", "said", "grade"), OF_TRIVIAQA.values(), ids=OF_TRIVIAQA)
def test_triviaqa_takes_each_name_of_the_answer_and_nothing_with_it(names, said, grade):
    kind = Aliases(benchmarks()["triviaqa"], "0")
    item = kind.item({"question": "q", "answer": {"aliases": names, "value": names[0]}})
    assert kind.grade(said, item) == grade


async def test_simpleqa_counts_what_is_correct_incorrect_and_not_attempted_and_leaves_out_what_nobody_read(make_env):
    said = {
        "a": "\\boxed{correct}",
        "b": "so \\boxed{INCORRECT}",
        "c": "\\boxed{\\text{NOT_ATTEMPTED}}",
        "d": "A",
        "": "?",
    }
    rows = [{"problem": f"{letter}?", "answer": "Paris"} for letter in (*said, *"aa")]

    def script(prompt: str) -> str:
        judged = re.search(r"Answer to judge: (\w)", prompt)
        asked = re.findall(r"(\w?)\?", prompt)
        return said[judged[1]] if judged else asked[-1]

    env = await make_env("simpleqa", rows, script=script)
    for _ in range(2):  # counts are of one evaluation
        await env.evaluate()
    metrics = {name.removeprefix("eval/"): value for name, value in env.eval_metrics.items()}
    assert (metrics["failed"], metrics["judge/unread"], metrics["mean@1"]) == (1, 1, 0.5)
    shares = [metrics[name] for name in ("correct", "incorrect", "not_attempted")]
    assert shares == [3 / 6, 1 / 6, 2 / 6]
    assert metrics["correct_given_attempted"] == 3 / 4
    assert metrics["f_score"] == pytest.approx(2 / (1 / (3 / 6) + 1 / (3 / 4)))


NO_DATE = {"day": "", "month": "", "year": ""}
SPANS = {"number": "", "spans": ["Ann Lee", "Ben"], "date": NO_DATE}
READERS = {"number": ["12", ""], "spans": [[], []], "date": [NO_DATE, {"day": "3", "month": "May", "year": "1990"}]}
OF_DROP = {  # as lm-eval 0.4.13 scores them
    "one of two spans": ("Ann Lee", 0.5),
    "half of one": ("Ann", 0.33),
    "a number": ("12.0 yards", 0.67),
    "another number": ("13 yards", 0.0),
    "a date": ("3 May 1990", 1.0),
    "a part of a date, without its numbers": ("May", 0.0),
}


@pytest.mark.parametrize(("said", "grade"), OF_DROP.values(), ids=OF_DROP)
def test_drop_takes_the_answers_of_every_reader_and_compares_numbers_whole(said, grade):
    kind = F1(benchmarks()["drop"], "0")
    item = kind.item({"passage": "p", "question": "q?", "answer": SPANS, "validated_answers": READERS})
    assert item["answers"] == [["Ann Lee", "Ben"], ["12"], ["3 May 1990"]]
    assert kind.grade(said, item) == grade


@pytest.mark.parametrize("name", ROWS)
async def test_a_right_reply_scores_and_another_does_not(make_env, name):
    row, reply = ROWS[name]
    of_right, of_wrong = JUDGES.get(name, ("\\boxed{correct}", "\\boxed{incorrect}"))
    env = await make_env(name, [row], script=of_right)
    item = await env.problem("test", 0)
    right = [said for said in (env.gold(item), reply) if said]
    assert await env.grades(right, item) == [1.0] * len(right)
    env.server.servers[0].script = of_wrong
    wrong = [0.1 if name == "mtbench" else 0.0, 0.0, 0.0]
    assert await env.grades(["u</answer>, or", "", f"<think>{reply}"], item) == wrong


TIES = {  # ratings of right and wrong answers, as `ref` and as `tied`: the score
    "all as it should be": ({"ref": [[9], [2]], "tied": [[9, 8], [2]]}, 1.01 - 0.01 * (1 - 0.9999877116507956)),
    "right ones that lie apart": ({"ref": [[9], [2]], "tied": [[9, 3], [2]]}, 0.6 - 0.01 * 0.6822040),
    "a wrong one above": ({"ref": [[2], [9]], "tied": [[9, 9], [2]]}, 0.3 + 0.2 - 0.01),
    "equal": ({"ref": [[5], [5]], "tied": [[5, 5], [5]]}, 0.0),
}


@pytest.mark.parametrize(("given", "expected"), TIES.values(), ids=TIES)
async def test_answers_that_are_as_good_as_each_other_are_rated_alone(make_env, given, expected):
    rows, ratings = [ROWS["pairwise_judgement"][0]], {}
    for kind, (right, wrong) in given.items():
        answers = [[f"{kind}-{name}{n}" for n in range(len(found))] for name, found in (("r", right), ("w", wrong))]
        ratings |= dict(zip([*answers[0], *answers[1]], right + wrong, strict=True))
        row = {"prompt": "q?", "subset": "Ties", "id": f"{kind}:1", "chosen": answers[0], "rejected": answers[1]}
        rows.append(row)

    def script(prompt):
        rating = [rating for answer, rating in ratings.items() if answer in prompt]
        return f"\\boxed{{{rating[0]}}}" if rating else "The best answer is: A"

    env = await make_env("pairwise_judgement", rows, script=script)
    found = await evaluated(env)
    assert found["ties_score"] == pytest.approx(expected, abs=1e-4)
    assert found["mean_of_subsets"] == pytest.approx((found["ties_score"] + found["mean_Math"]) / 2)
    env.server.servers[0].script = lambda prompt: "no number" if "tied" in prompt else script(prompt)
    found = await evaluated(env)
    assert (found["failed"], "ties_score" in found) == (1, False)


EXPRESSIONS = {
    "equal in another form": (r"2 h g", r"v = 2 g h", 100.0),
    "another factor": (r"3 g h", r"2 g h", 60 - 100 / 4),
    "a term too many": (r"2 g h + x", r"2 g h", 60 - 100 * 2 / 4),
    "far from it": (r"\sin x + y^2 + \sqrt{z}", r"2 g h", 0.0),
    "no formula": (r"\frac{1", r"2 g h", 0.0),
}


@pytest.mark.parametrize(("said", "right", "expected"), EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_a_formula_is_worth_less_the_further_its_tree_is_from_the_right_one(said, right, expected):
    pytest.importorskip("latex2sympy2_extended")
    assert 100 * distance_score(said, right) == pytest.approx(expected)
    with pytest.raises(ValueError, match="no formula"):
        distance_score(said, "+")


async def test_formulas_that_are_not_right_are_compared_by_their_distance(make_env):
    pytest.importorskip("math_verify")
    row = {**ROWS["phybench"][0], "answer": "2 g h"}
    rows = [{**row, "content": question} for question in ("one?", "two?", "three?")]

    def script(prompt):
        return "I do not know." if "two?" in prompt else "\\boxed{3 g h}" if "one?" in prompt else "\\boxed{2 h g}"

    found = await evaluated(await make_env("phybench", rows, script=script))
    assert (found["eed"], found["eed_unknown"], found["mean@1"]) == (pytest.approx(135 / 3), 0, pytest.approx(1 / 3))


def tree(label, *parts):
    return Tree(label, tuple(map(tree, parts)) if parts and isinstance(parts[0], str) else parts)


def test_a_subtree_is_moved_at_a_discount():
    whole = tree("+", tree("*", *"abcdefgh"), tree("x"))
    assert edit_distance(whole, whole) == 0
    assert edit_distance(whole, tree("+", tree("x"))) == pytest.approx(5 + 0.6 * (9 - 5))
    assert edit_distance(tree("+", tree("x")), whole) == pytest.approx(5 + 0.6 * (9 - 5))
    assert edit_distance(tree("x"), tree("+", *"xy")) == 2


async def evaluated(env):
    await env.evaluate()
    return {name.removeprefix("eval/"): value for name, value in env.eval_metrics.items()}


async def test_wins_ties_and_losses_against_another_model_are_counted_by_category(make_env, tmp_path):
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text("".join(json.dumps({"uid": n, "answer": "theirs"}) + "\n" for n in range(2)))
    rows = [{"uid": n, "prompt": f"q{n}?", "category": f"c{n}"} for n in range(2)]

    def script(prompt):
        if "[answer A]" not in prompt:
            return "ours"
        return "\\boxed{A}" if "q0" not in prompt or prompt.index("ours") < prompt.index("theirs") else "\\boxed{B}"

    env = await make_env("arena_hard", rows, script=script, baseline_dataset=str(theirs))
    found = await evaluated(env)
    assert (found["win_rate"], found["tie_rate"], found["loss_rate"], found["mean@1"]) == (0.5, 0.5, 0.0, 0.75)
    assert (found["mean_c0"], found["mean_c1"], found["mean@1_stderr"]) == (1.0, 0.5, pytest.approx(0.25))
    assert env.eval_metrics["judge/changed_with_the_order"] == 1


async def test_both_turns_of_a_conversation_are_asked_and_rated(make_env):
    def script(prompt):
        if "Rate the last answer" in prompt:
            return "\\boxed{4}" if "second?" in prompt else "\\boxed{8}"
        return "two" if "second?" in prompt else "one"

    env = await make_env("mtbench", [{"turns": ["first?", "second?"], "category": "c"}], script=script)
    found = await evaluated(env)
    assert [found[name] for name in ("mean@1", "rating_turn_1", "rating_turn_2")] == pytest.approx([0.6, 8.0, 4.0])
    asked = [request["messages"] for request in env.server.servers[0].requests]
    assert [turn["content"] for turn in asked[2]] == ["first?", "one", "second?"]
    assert "[request]\nfirst?\n[answer]\none\n\n[request]\nsecond?\n[answer]\ntwo" in asked[3][0]["content"]


async def test_refusing_is_right_in_the_inverted_groups_alone(make_env):
    rows = [{"prompt": "q?", "overarching_category": group} for group in ("plain", "bad")]
    settings = {"inverted_categories": ["bad"], "script": "\\boxed{refuses}"}
    found = await evaluated(await make_env("refusalbench", rows, **settings))
    assert (found["mean_plain"], found["mean_bad"], found["refusal_rate_normal"]) == (0.0, 1.0, 1.0)


def writers_files(folder):
    texts = {"good": "g", "bad": "b"}
    samples = {writer: {"samples": {"1": {"7": text, "8": "no prompt"}}} for writer, text in texts.items()}
    given = {"samples": samples, "prompts": {"7": "Rate: [TEST MODEL RESPONSE]"}, "reference": {"good": 9, "bad": 2}}
    for name, content in given.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return {f"{name}_file": str(folder / f"{name}.json") for name in given}


async def test_a_judge_is_measured_by_its_order_of_the_writers(tmp_path):
    def script(prompt):
        return (
            "<think>Coherence: 1</think>Coherence: 8\nStyle: [6]" if "Rate: g" in prompt else "Coherence: 3\nLength: 99"
        )

    local = type("Local", (JudgeMarkEvalEnv,), {"load_tokenizer": lambda self: FakeTokenizer()})
    config = local.env_config_cls(benchmark="judgemark", use_wandb=False, **writers_files(tmp_path))
    env = local(config, [APIServerConfig(base_url="http://fake/v1")])
    env.server.servers = [FakeServer(script)]
    await env.setup()
    found = await evaluated(env)
    assert (found["score_good"], found["score_bad"], found["kendall_tau"], found["failed"]) == (7.0, 3.0, 1.0, 0)
    env.server.servers[0].script = "It is fine."
    with pytest.raises(EnvironmentFault, match="all 2 problems of the evaluation failed"):
        await env.evaluate()


async def test_an_evaluation_without_an_environment_runs_on_local_rows(tmp_path):
    path = tmp_path / "aime.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{n}?", "answer": n}) + "\n" for n in range(2)))
    manager = ServerManager([APIServerConfig(base_url="http://fake/v1", health_check=False)])
    manager.servers = [FakeServer("<think>hm</think>\\boxed{1}")]
    assert await AIME24(dataset=str(path))(manager) == {"accuracy": 0.5, "pass@1": 0.5}


OLD_NAMES = {
    "where the rows are": (
        {"dataset_name": "a.jsonl", "subset": "b", "eval_split": "c", "few_shot_split": "d"},
        {"dataset": "a.jsonl", "dataset_config": "b", "eval_split": "c", "few_shot_split": "d"},
    ),
    "how is asked": (
        {"eval_temperature": 0.6, "eval_max_tokens": 9, "num_few_shot": 2, "custom_system_prompt": "s"},
        {"eval_temperature": 0.6, "max_token_length": 9, "few_shot": 2, "system_prompt": "s"},
    ),
    "nothing": (
        {"eval_max_tokens": 0, "judge_max_tokens": 0, "subjects": None},
        {"max_token_length": 2048, "only": None},
    ),
    "which rows": (
        {"categories": ["c"], "max_samples": 3, "shuffle_seed": 4},
        {"only": ["c"], "eval_problems": 3, "seed": 4},
    ),
    "mixeval": (
        {"difficulty": "hard", "question_types": ["freeform"]},
        {"dataset_config": "MixEval_Hard", "eval_split": "free_form"},
    ),
    "without effect": ({"max_retries": 3, "full_debug": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.values(), ids=OLD_NAMES)
def test_settings_are_taken_under_their_names_of_0_4_0(old, new):
    config = of_table("mmlu")[1](**old)
    assert {name: getattr(config, name) for name in new} == new
    flags = [text for name, value in old.items() for text in (f"--env.{name}", json.dumps(value))]
    found = resolve(of_table("mmlu")[0], "evaluate", flags).env
    assert {name: getattr(found, name) for name in new} == new


def test_the_judge_of_0_4_0_is_an_engine_with_a_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    given = {"judge_model_name": "j", "judge_base_url": "http://j/v1", "judge_api_key_env": "JUDGE_KEY"}
    judge = of_table("simpleqa")[1](**given).judge
    assert (judge.model_name, judge.base_url, judge.api_key) == ("j", "http://j/v1", "secret")


async def test_only_the_groups_that_are_asked_for_are_evaluated(make_env):
    rows = [{"question": f"q{n}?", "choices": ["x", "y"], "answer": 1, "subject": f"Big s{n}"} for n in range(3)]
    env = await make_env("mmlu", rows, subjects=["big_s1"])
    assert [item["question"] for item in env.problems["test"]] == ["q1?"]
    with pytest.raises(ConfigError, match="the groups of mmlu are Big s0, Big s1, Big s2"):
        await make_env("mmlu", rows, only=["none"])


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


async def test_a_comparison_of_choices_that_was_killed_asks_only_for_what_is_missing(make_env, tmp_path):
    rows = [{"question": f"q{n}?", "choices": ["xx", "y"], "answer": 1, "subject": "s"} for n in range(3)]
    env = await make_env("mmlu", rows, scoring="loglikelihood")
    await env.server.close()
    with ScriptedEngine(lambda prompt: "", write_tokenizer(tmp_path / "tokenizer")) as engine:
        address = APIServerConfig(model_name="scripted", base_url=f"{engine.url}/v1", server_type="sglang")
        env.server = ServerManager([address])

        async def killed():
            with kept_responses(env.server, tmp_path):
                await env.compare(await env.problem("test", 0), asyncio.Semaphore())
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await killed()
        assert len(engine.prompts) == 2
        with kept_responses(env.server, tmp_path):
            await env.evaluate()
        await env.server.close()
    assert len(engine.prompts) == len(set(engine.prompts)) == 2 * len(rows)
    assert (env.eval_metrics["eval/acc"], env.eval_metrics["eval/failed"]) == (0.0, 0)
    assert list(tmp_path.glob("evaluate.journal.*")) == []


def test_a_process_that_compares_choices_is_killed_and_started_again(tmp_path):
    rows = [{"question": f"q{n}?", "choices": ["xx", "y"], "answer": n % 2, "subject": "s"} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    killed = []

    def kill_at_the_fourth(prompt):
        if len(engine.prompts) == 4 and not killed:
            killed.append(child.pid)
            os.kill(child.pid, signal.SIGKILL)
        return ""

    def flags(folder):
        settings = {"dataset": tmp_path / "rows.jsonl", "scoring": "loglikelihood", "max_eval_workers": 1}
        settings["data_dir_to_save_evals"] = tmp_path / folder
        return [*engine.flags, *(text for name, value in settings.items() for text in (f"--env.{name}", str(value)))]

    def result(folder):
        metrics = json.loads((tmp_path / folder / "metrics.json").read_text())["results"]
        return metrics, (tmp_path / folder / "samples.jsonl").read_text()

    with ScriptedEngine(kill_at_the_fourth, write_tokenizer(tmp_path / "tokenizer")) as engine:
        module = "atroposlib.environments.eval_environments.command"
        child = Child(module, ["run", "mmlu", *flags("killed")], tmp_path / "log")
        child.stdout.close()
        assert child.wait(60) == -signal.SIGKILL, (tmp_path / "log").read_text()
        assert run_environment(load_class("mmlu"), ["evaluate", *flags("killed")]) == 0
        asked, engine.prompts = engine.prompts, []
        assert run_environment(load_class("mmlu"), ["evaluate", *flags("whole")]) == 0
    assert asked == [*engine.prompts[:4], *engine.prompts[3:]]
    assert result("killed") == result("whole")
    assert result("whole")[0]["all"]["eval/acc"] == pytest.approx(2 / 3)


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
    assert [f1("a tower", ["the tower"]), f1("", ["x"]), f1("x y", ["y z"])] == [1.0, 0.0, 0.5]


def judge_of(script):
    manager = ServerManager([APIServerConfig(base_url="http://fake/v1", health_check=False)])
    manager.servers = [FakeServer(script)]
    return Judge(manager)


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
    judge = judge_of(script)
    assert await judge.prefer("q", "good", "bad") == expected
    assert +judge.counts == counts


async def test_what_a_judge_says_that_cannot_be_read_is_counted_and_no_preference():
    judge = judge_of("<think>\\boxed{A}")
    with pytest.raises(VerifierFault, match="in each of both orders"):
        await judge.prefer("q", "good", "bad")
    assert judge.counts["unread"] == 2
    half = judge_of(lambda prompt: "\\boxed{A}" if prompt.index("good") < prompt.index("bad") else "hm")
    with pytest.raises(VerifierFault, match="both orders"):  # it may prefer the first place
        await half.prefer("q", "good", "bad")
    assert (half.counts["unread"], half.counts["pairs"]) == (1, 0)
    grader = judge_of("hm")
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


METRICS = {"eval/acc": 0.5, "eval/acc_stderr": 0.1, "eval/mean@1": 0.5, "eval/mean@1_stderr": 0.1}
METRICS |= {"eval/mean@1_ci_low": 0.3, "eval/mean@1_ci_high": 0.7}


def write_result(folder, grades):
    folder.mkdir()
    facts = {"config_general": {"model_name": "m"}, "results": {"all": METRICS}}
    (folder / "metrics.json").write_text(json.dumps(facts))
    lines = [json.dumps({"item": {"q": number}, "grades": [grade]}) for number, grade in enumerate(grades)]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_results_are_shown_and_compared_item_by_item(tmp_path):
    first, second = write_result(tmp_path / "a", [0, 0, 1]), write_result(tmp_path / "b", [1, 1, 1, 0])
    assert f"| {first} | m | eval/acc | 0.5000 | ± 0.1000 |" in table([first, second])
    assert f"| {second} | m | eval/mean@1 | 0.5000 | ± 0.1000, 0.3000 to 0.7000 |" in table([first, second])
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
        env.judge = judge_of(lambda prompt: "\\boxed{tie}")
        better = {"a": 3, "b": 2, "c": 2, "d": 1}

        async def prefer(question, one, other, better=better):
            return 0.5 + 0.5 * ((better[one] > better[other]) - (better[one] < better[other]))

        env.judge.prefer = prefer
        assert await env.grades(list("abcd"), {"question": "q"}) == pytest.approx(expected)
        assert env.reward(0.75) == 0.25


async def test_a_reply_that_no_judgement_could_be_read_of_has_no_score():
    env = RLAIFEnv.__new__(RLAIFEnv)
    env.config, env.judge = RLAIFConfig(), judge_of("hm")
    assert [is_scored(grade) for grade in await env.grades(["a", "b"], {"question": "q"})] == [False, False]
