"""The parts of GuessEnv, rollouts of several turns against scripted answers, and policies that must not be rewarded."""

import asyncio
import re

import pytest

from atroposlib.environments.check import reward_faults
from atroposlib.environments.multi_turn import Reply
from atroposlib.examples.guess import GuessEnv, Guessing, only_number
from atroposlib.testing import roll_out

GUESSES = {
    "a number": ("Is it 7?", 7),
    "said twice": ("7. I say 7.", 7),
    "a choice": ("3 or 5", None),
    "none": ("dunno", None),
    "empty": ("", None),
    "no number that anyone needs": ("9" * 5000, 999_999_999),
}


@pytest.mark.parametrize(("text", "expected"), GUESSES.values(), ids=GUESSES)
def test_the_only_number_is_the_guess(text, expected):
    assert only_number(text) == expected


HINTS = {"3": "Higher.", "9": "Lower.", "dunno": "Write one number from 1 to 20, and no other."}


@pytest.mark.parametrize(("said", "hint"), HINTS.items(), ids=HINTS)
def test_hints_lead_to_the_number(said, hint):
    assert asyncio.run(Guessing(7).step(Reply(said))).observation == hint


def test_a_player_that_follows_the_hints_is_rewarded_the_more_the_earlier_it_hits(tmp_path):
    def answer(prompt):
        low, high = 1, 20
        for guess, said in re.findall(r"assistant\n(\d+)<\|im_end\|>\n<\|im_start\|>user\n(Higher|Lower)", prompt):
            low, high = (int(guess) + 1, high) if said == "Higher" else (low, int(guess) - 1)
        return str((low + high) // 2)

    groups = roll_out(GuessEnv, answer, tmp_path, groups=3, settings=["--env.ensure_scores_are_not_same", "false"])
    for group in groups:
        turns = group["overrides"][0]["turns"]
        assert group["scores"] == pytest.approx([0.9 ** (turns - 1)] * 4)
        assert group["messages"][0][-1]["role"] == "assistant"


def test_the_number_scores_and_junk_nothing_the_rules_a_constant_and_an_unfinished_thought_do_not(tmp_path):
    assert reward_faults(GuessEnv, tmp_path) == []
