"""The parts of GuessEnv, and rollouts of several turns against scripted answers."""

import re

import pytest

from atroposlib.examples.guess import TURNS, GuessEnv, hint, last_number, score
from atroposlib.testing import roll_out

GUESSES = {"a number": ("Is it 7?", 7), "the last": ("3 or 5", 5), "none": ("dunno", None), "empty": ("", None)}


@pytest.mark.parametrize(("text", "expected"), GUESSES.values(), ids=GUESSES)
def test_the_last_number_is_the_guess(text, expected):
    assert last_number(text) == expected


def test_hints_lead_to_the_number():
    assert (hint(3, 7), hint(9, 7)) == ("Higher.", "Lower.")
    assert hint(None, 7).startswith("I saw no number")


def test_an_earlier_hit_scores_higher():
    assert [score(turn) for turn in range(TURNS)] == sorted((score(turn) for turn in range(TURNS)), reverse=True)


def test_a_player_that_follows_the_hints_is_rewarded(tmp_path):
    def answer(prompt):
        low, high = 1, 20
        for guess, said in re.findall(r"assistant\n(\d+)<\|im_end\|>\n<\|im_start\|>user\n(Higher|Lower)", prompt):
            low, high = (int(guess) + 1, high) if said == "Higher" else (low, int(guess) - 1)
        return str((low + high) // 2)

    (group,) = roll_out(GuessEnv, answer, tmp_path)
    assert all(reward > 0 for reward in group["scores"])
    assert group["messages"][0][-1]["role"] == "assistant"


CHEATS = {
    "junk": "qwpo eiru",
    "nothing": "",
    "all numbers": " ".join(map(str, range(21, -1, -1))),
    "the question": "1 to 20",
}


@pytest.mark.parametrize("reply", CHEATS.values(), ids=CHEATS)
def test_what_follows_no_hint_is_not_rewarded(reply, tmp_path):
    groups = roll_out(GuessEnv, lambda prompt: reply, tmp_path, groups=3)
    assert [group["scores"] for group in groups] == [[0.0] * 4] * 3
