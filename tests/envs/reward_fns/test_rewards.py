import re

import numpy as np
import pytest

from atroposlib.envs.reward_fns import cosine_scaled_reward as cosine
from atroposlib.envs.reward_fns.accuracy_reward import AccuracyReward, accuracy_reward
from atroposlib.envs.reward_fns.cascading_r1_math_reward import cascading_r1_math_reward, format_reward
from atroposlib.envs.reward_fns.chandas_meter_reward import ChandasMeterReward, iast_to_slp1, syllable_weights
from atroposlib.envs.reward_fns.crossword_format_reward import CrosswordFormatReward, crossword_format_reward
from atroposlib.envs.reward_fns.format_reward import FormatReward
from atroposlib.envs.reward_fns.format_reward import format_reward as tag_reward
from atroposlib.envs.reward_fns.r1_reward import (
    AccuracyXReward,
    FormatReasoningReward,
    R1Reward,
    format_reasoning_reward,
    parse_reasoning_response,
    r1_reward,
)
from atroposlib.envs.reward_fns.reasoning_steps_reward import ReasoningStepsReward, reasoning_steps_reward
from atroposlib.envs.reward_fns.repetition_penalty_reward import RepetitionPenaltyReward, repetition_penalty_reward
from atroposlib.errors import ConfigError, VerifierFault

TAGS = {
    "one of two": ("<think>a</think>", {}, 1.0),
    "none": ("a", {}, 0.0),
    "unclosed": ("<think>a", {}, 0.0),
    "over lines": ("<answer>\na\n</answer>", {}, 1.0),
    "other case": ("<THINK>a</THINK>", {}, 1.0),
    "other case matters": ("<THINK>a</THINK>", {"case_sensitive": True}, 0.0),
    "all needed": ("<think>a</think>", {"require_all_tags": True}, 0.0),
    "all there": ("<think>a</think><answer>b</answer>", {"require_all_tags": True}, 1.0),
    "own tags": ("<plan>a</plan>", {"preferred_tags": ["plan"]}, 1.0),
    "a tag is no pattern": ("<axb>a</axb>", {"preferred_tags": ["a.b"]}, 0.0),
}


@pytest.mark.parametrize(("content", "options", "expected"), TAGS.values(), ids=TAGS)
def test_tags_are_found(content, options, expected):
    assert FormatReward(**options)([content]) == [expected]


def test_the_function_form_takes_tags():
    assert tag_reward(["<plan>a</plan>", "b"], ["plan"], solution="ignored") == [1.0, 0.0]


def test_only_the_text_after_the_thoughts_is_judged():
    completion = r"<think>\boxed{1}</think> \boxed{2}"
    assert accuracy_reward([completion, completion], solution=["1", "2"]) == [0.0, 1.0]


def test_ground_truth_is_preferred_to_the_solution():
    assert accuracy_reward([r"\boxed{2}"], solution="1", ground_truth="2") == [1.0]


def test_many_boxes_are_guessing():
    assert AccuracyReward(max_boxed_threshold=2)([r"\boxed{3} \boxed{3} \boxed{3}"], solution="3") == [0.0]


@pytest.mark.parametrize("solution", [None, ["1", "2", "3"]], ids=["none", "another number"])
def test_missing_solutions_are_verifier_faults(solution):
    for reward in (AccuracyReward(), AccuracyXReward(), R1Reward(), cosine.CosineScaledReward()):
        with pytest.raises(VerifierFault, match="solution="):
            reward(["a", "b"], solution=solution)


REASONED = {
    "right and well formed": (r"<think>hm</think> \boxed{2}", 1.5),
    "right with other tags": (r"<think>a < b</think> <b>\boxed{2}</b>", 1.5),
    "right without thoughts": (r"\boxed{2}", 1.0),
    "right after two blocks": (r"<think>a</think><think>b</think> \boxed{2}", 1.0),
    "wrong but well formed": (r"<think>hm</think> \boxed{3}", 0.0),
}


@pytest.mark.parametrize(("completion", "expected"), REASONED.values(), ids=REASONED)
def test_the_form_counts_only_for_right_answers(completion, expected):
    assert cascading_r1_math_reward([completion], "2") == [expected]


def test_the_form_has_a_value_of_its_own():
    assert format_reward(["<think>a</think>b", "b"], reward_value=2.0) == [2.0, 0.0]


def test_a_completion_is_taken_apart():
    assert parse_reasoning_response("<think> a </think> b ") == {
        "thinking_content": "a",
        "response": "b",
        "multiple_thinking": False,
    }
    assert parse_reasoning_response("b")["response"] == "b"
    assert parse_reasoning_response("<think>a</think>b<think>c</think>d") == {
        "thinking_content": "a\nc",
        "response": "d",
        "multiple_thinking": True,
    }


FORMS = {
    "whole": ("<think>a</think>b", {}, 0.5),
    "no thoughts": ("b", {}, 0.0),
    "no thoughts needed": ("b", {"require_thinking": False}, 0.5),
    "no response": ("<think>a</think>", {}, 0.0),
    "no response needed": ("<think>a</think>", {"require_response": False}, 0.5),
    "two blocks": ("<think>a</think><think>b</think>c", {}, 0.0),
    "two blocks allowed": ("<think>a</think><think>b</think>c", {"allow_multiple_thinking": True}, 0.5),
}


@pytest.mark.parametrize(("content", "options", "expected"), FORMS.values(), ids=FORMS)
def test_the_form_of_reasoning(content, options, expected):
    assert FormatReasoningReward(**options)([content]) == [expected]


MATCHES = {
    "contained": ("<think>a</think>It is Paris.", "paris", {}, 1.0),
    "only thought of": ("<think>Paris</think>It is Rome.", "paris", {}, 0.0),
    "case matters": ("It is Paris.", "paris", {"case_sensitive": True}, 0.0),
    "exact": ("Paris", "paris", {"exact_match": True}, 1.0),
    "not exact": ("It is Paris", "paris", {"exact_match": True}, 0.0),
    "a message": ("Paris", {"role": "assistant", "content": "Paris"}, {}, 1.0),
    "a number": ("It is 7", 7, {}, 1.0),
    "own value": ("Paris", "paris", {"reward_value": 3.0}, 3.0),
    "part of a number": ("It is 17 or 7.5", 7, {}, 0.0),
    "part of a word": ("It is Parisian", "paris", {}, 0.0),
    "mentioned, but not the answer": (r"7 + 1 = \boxed{8}", 7, {}, 0.0),
    "another form of the number": (r"\boxed{\frac{1}{2}}", "0.5", {}, 1.0),
    "a thought without end": ("<think>It is Paris", "paris", {}, 0.0),
    "a thought that the prompt opened": ("It is Paris? </think> Rome", "paris", {}, 0.0),
}


@pytest.mark.parametrize(("content", "solution", "options", "expected"), MATCHES.values(), ids=MATCHES)
def test_solutions_are_looked_for_in_the_response(content, solution, options, expected):
    assert AccuracyXReward(**options)([content], solution=solution) == [expected]


def test_r1_adds_form_and_answer():
    completions = ["<think>a</think>Paris", "Paris", "<think>a</think>Rome", "Rome"]
    assert r1_reward(completions, "Paris") == [1.5, 1.0, 0.5, 0.0]
    assert R1Reward(format_weight=1.0, accuracy_weight=0.0)(completions, solution="Paris") == [1.0, 0.0, 1.0, 0.0]
    assert format_reasoning_reward(completions) == [0.5, 0.0, 0.5, 0.0]


STEPS = {
    "nothing": ("42", 0.0),
    "long": ("w " * 11, 0.1),
    "three steps": ("Step 1: a\nStep 2: b\nStep 3: c", 0.5),
    "one step of three": ("Step 1: a", 0.5 / 3),
    "numbered list": ("1. a\n2. b\n3. c", 0.5),
    "bullets": ("- a\n* b\n• c", 0.4),
    "transitions": ("First a, then b, finally c", 0.3),
    "everything is capped": ("Step 1: 1. a\n" * 3 + "\n1. a\n2. b\n3. c\n- a\n- b\n- c\nfirst then finally", 1.0),
}


@pytest.mark.parametrize(("content", "expected"), STEPS.values(), ids=STEPS)
def test_steps_of_reasoning_are_counted(content, expected):
    assert reasoning_steps_reward([content]) == [pytest.approx(expected)]


def test_weights_of_markers_can_be_set_one_by_one():
    reward = ReasoningStepsReward(pattern_weights={"bullet_points": 1.0}, min_steps=1)
    assert reward(["- a"]) == [1.0]
    assert reward(["1. a"]) == [0.5]


DISTINCT = "The quick brown fox jumps over one lazy dog. Nearby seven grey cats watch quietly from a fence."


def test_text_without_repetition_has_no_penalty():
    assert repetition_penalty_reward([DISTINCT]) == [0.0]


def test_short_text_gets_its_small_penalty():
    assert RepetitionPenaltyReward(short_text_penalty=-0.2)(["Too short."]) == [-0.2]


def test_a_repeated_sentence_gets_the_base_penalty_and_more():
    text = "This very sentence comes again. " * 2 + "But this other one does not."
    assert repetition_penalty_reward([text]) == [pytest.approx(-0.6 - 0.4 / 3)]


def test_stutter_is_penalised_between_the_limits():
    stuttering = "stop stop stop stop stop stop stop stop stop stop stop. And go."
    assert repetition_penalty_reward([stuttering]) == [-1.0]
    [mild] = repetition_penalty_reward([DISTINCT + " The quick brown fox jumps again."])
    assert -1.0 < mild <= -0.1


def test_a_high_threshold_allows_more():
    text = DISTINCT + " The quick brown fox jumps again."
    assert repetition_penalty_reward([text], threshold=0.9) == [0.0]


def test_components_can_be_switched_off():
    weights = dict.fromkeys(["phrase_repetition", "consecutive_repetition", "word_repetition"], 0.0)
    text = DISTINCT + " The quick brown fox jumps again."
    assert RepetitionPenaltyReward(component_weights={**weights, "beginning_repetition": 0.0})([text]) == [0.0]
    assert RepetitionPenaltyReward(component_weights=weights)([text]) == [pytest.approx(-0.5 / 3 + 0.05, abs=0.05)]


CROSSWORDS = {
    "well formed": ("1-Across: CAT", {}, 1.0),
    "with a full stop": ("1-Across: CAT.", {}, 1.0),
    "lower case": ("2-down: dog", {}, 1.0),
    "headings": ("Across:\n1. a pet\n\n1-Across: CAT", {}, 1.0),
    "none": ("The answer is CAT", {}, 0.0),
    "a digit": ("1-Across: CAT, 2-Down: D0G", {}, 0.0),
    "a digit allowed": ("1-Across: CAT, 2-Down: D0G", {"penalize_invalid_chars": False}, 1.0),
    "few letters": ("1-Across: CAT", {"valid_chars": "ab"}, 0.0),
    "own pattern": ("=CAT=", {"format_patterns": [re.compile("=CAT=")], "reward_value": 2.0}, 2.0),
}


@pytest.mark.parametrize(("content", "options", "expected"), CROSSWORDS.values(), ids=CROSSWORDS)
def test_crossword_answers(content, options, expected):
    assert CrosswordFormatReward(**options)([content]) == [expected]


def test_crossword_answers_in_function_form():
    assert crossword_format_reward(["1-Across: CAT", "CAT"]) == [1.0, 0.0]


@pytest.fixture
def embedded(monkeypatch):
    """Embeddings by hand: text -> direction."""
    directions = {"east": [1.0, 0.0], "north": [0.0, 2.0], "west": [-3.0, 0.0], " ": [0.0, 0.0]}
    loaded = []

    def load(model_name):
        loaded.append(model_name)
        return lambda texts: np.array([directions[text] for text in texts])

    monkeypatch.setattr(cosine, "load_embedder", load)
    return loaded


def test_likeness_of_meaning_is_scaled_and_cut(embedded):
    completions = ["east", "north", "west", " "]
    assert cosine.cosine_scaled_reward(completions, solution="east") == [1.0, 0.0, -1.0, 0.0]
    steep = cosine.CosineScaledReward(scale_factor=3.0, min_reward=-1.5, max_reward=0.5, default_reward=0.1)
    assert steep(completions, solution=["east"] * 4) == [0.5, -1.5, -1.5, 0.1]


def test_every_reward_uses_its_own_model(embedded):
    first, second = cosine.CosineScaledReward("one"), cosine.CosineScaledReward("two")
    for reward in (first, second, first):
        reward(["east"], solution="east")
    assert embedded == ["one", "two", "one"]


def test_sanskrit_is_scanned():
    assert iast_to_slp1("Dharmakṣetre ṭhakāraḥ") == "Darmakzetre WakAraH"
    assert iast_to_slp1("kṣa\u0304") == "kzA"
    assert syllable_weights("samavetā yuyutsavaḥ") == "LLGGLGLG"
    assert syllable_weights("na, 12 ca!") == "LL"


VERSES = {
    "tristubh": ("na jāyate mriyate vā kadācin", "tristubh", 1.0),
    "with diacritics in the name": ("na jāyate mriyate vā kadācin", "Triṣṭubh", 1.0),
    "anustubh in one line": ("dharmakṣetre kurukṣetre samavetā yuyutsavaḥ", "anustubh", 1.0),
    "anustubh with dandas": ("dharmakṣetre kurukṣetre | samavetā yuyutsavaḥ ||", "anustubh", 1.0),
    "too short": ("na jāyate", "tristubh", 4 / 11),
    "no syllable": ("...", "tristubh", 0.0),
}


@pytest.mark.parametrize(("poem", "meter", "expected"), VERSES.values(), ids=VERSES)
def test_metres_are_recognised(poem, meter, expected):
    assert ChandasMeterReward(meter)([poem]) == [pytest.approx(expected)]


def test_an_unknown_metre_is_refused():
    with pytest.raises(ConfigError, match="'sonnet'; known metres: anustubh"):
        ChandasMeterReward("sonnet")
