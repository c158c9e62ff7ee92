r"""The verdicts that a careful person would give; every entry is tried as a whole reply.

An answer without a mark of its own is put into \boxed{}.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from atroposlib.envs.reward_fns.math_answers import (
    clean,
    final_answer,
    last_boxed,
    read_quantity,
    read_unit,
    split_parts,
)
from atroposlib.envs.reward_fns.math_judge import MathJudge, first_look, scores
from atroposlib.envs.reward_fns.math_size import out_of_reach
from atroposlib.errors import VerifierFault
from atroposlib.rollouts.failures import Unscored

PLACES = [  # reply, gold, right
    (r"<think>\boxed{1}</think> \boxed{2}", "2", True),
    (r"<think>\boxed{1}</think> \boxed{2}", "1", False),
    (r"<think>a</think>\boxed{1}<think>b</think>\boxed{2}", "1", False),
    (r"<think>it must be \boxed{42}", "42", False),  # the thinking never ends
    (r"<think>a</think> \boxed{42} <think>or not", "42", False),
    (r"the template opened the thought: \boxed{41}</think> \boxed{42}", "42", True),
    (r"<THINK>\boxed{1}</THINK> \boxed{2}", "2", True),
    (r"<think>\boxed{42}</think> I do not know.", "42", False),
    (r"\boxed{41} no, \boxed{42}", "42", True),
    (r"\boxed{42} no, \boxed{41}", "42", False),
    (r"\boxed{41} or \boxed{42}", "42", False),  # a guess at two
    (r"\boxed{42}. So, once more: \boxed{42}", "42", True),
    (r"\boxed{42}, \boxed{42}", "42", True),
    (r"$x=\boxed{1}$ and $x=\boxed{2}$", "1,2", True),
    (r"$x=\boxed{2}$ or $x=\boxed{1}$", r"\{1,2\}", True),
    (r"$x=\boxed{1}$ and $x=\boxed{2}$", "2", False),
    ("\\boxed{1}\n\n\\boxed{2}", "1, 2", True),
    ("\\boxed{1}\n\n\\boxed{2}", "2", True),  # no list is asked for: the last one counts
    (r"\boxed{1}, \boxed{2}, \boxed{3}", "1, 2", False),
    (r"\boxed{3}. No, it is \boxed{1} and \boxed{2}", "1, 2", True),
    (r"\boxed{42} and then \boxed{4", "42", False),  # cut off while it gives another
    (r"\boxed{42", "42", False),
    (r"\boxed{\frac{1}{2}", r"\frac{1}{2}", False),
    (r"\boxed{}", "42", False),
    (r"\boxed{ }", "42", False),
    (r"Put into \boxed{}: \boxed{42}, as asked for in \boxed{}", "42", True),
    (r"\boxed{\boxed{42}}", "42", True),
    (r"\fbox{42}", "42", True),
    (r"\boxed 42", "42", True),
    (r"\\boxed{42}", "42", True),
    (r"\boxed{{{{42}}}}", "42", True),
    (r"**\boxed{42}**", "42", True),
    (r"\boxed{**42**}", "42", True),
    ("#### 42", "42", True),
    ("so #### -5", "-5", True),
    ("#### 41\n#### 42", "42", True),
    ("#### 42\n#### 41", "42", False),
    ("\\boxed{42}\n\n#### Check\nIt fits.", "42", True),  # a heading
    ("\\boxed{41}\n#### 42", "42", True),
    ("#### 42\nno, \\boxed{41}", "42", False),
    ("##### 42", "42", False),
    (r"#### \frac{1}{2}", "0.5", True),
    (r"#### $\boxed{42}$", "42", True),
    ("#### Paris", "Paris", True),
    ("<answer>42</answer>", "42", True),
    (r"<answer>\boxed{42}</answer>", "42", True),
    ("<answer>42</answer> <answer>41</answer>", "42", False),
    ("The answer is $42$.", "42", True),
    (r"The final answer is \(\frac{1}{2}\)", "0.5", True),
    ("The answer is 42.", "42", False),  # nothing marks it
    ("42", "42", False),
    ("", "42", False),
]

ACCEPTED = [  # answer, gold
    ("42", "42"),
    ("42", 42),
    ("42.0", "42"),
    ("42.", "42"),
    ("042", "42"),
    ("+42", "42"),
    ("-42", "-42"),
    ("−42", "-42"),  # U+2212
    ("– 42", "-42"),
    ("-0", "0"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    (r"1\,234", "1234"),
    ("1 234", "1234"),
    (r"1,\!234,\!567", "1234567"),
    ("1'234", "1234"),
    ("1,00,000", "100000"),
    ("1,234.50", "1234.5"),
    ("1234", "1,234"),
    (r"\$18", "18"),
    ("$18.00", "18"),
    ("-$5", "-5"),
    ("€1,250", "1250"),
    (r"18 \text{ dollars}", "18"),
    ("18 dollars", "$18"),
    ("18 USD", "18"),
    ("5¢", "5"),
    ("$1.5$ million", "1500000"),
    (r"11.4\%", r"11\frac{2}{5}\%"),
    ("15 square cm", r"15\mbox{ cm}^2"),
    (r"\$0.50", r"50 \text{ cents}"),
    ("50%", "50"),
    (r"50\%", "0.5"),
    ("0.5", r"50\%"),
    (r"50 \text{ percent}", r"50\%"),
    ("12.5 percent", "12.5"),
    (r"5 \text{ cm}", "5"),
    ("5cm", r"5 \text{ cm}"),
    (r"5\ \mathrm{cm}^2", "5"),
    ("5 square centimeters", r"5\text{ cm}^2"),
    (r"2 \text{ hours}", r"120 \text{ minutes}"),
    ("1.5 km", "1500 m"),
    ("60 mph", "60 miles per hour"),
    ("3 red apples", "3"),
    ("3 apples", "3 fruits"),
    ("5th", "5"),
    ("2.5 million", "2500000"),
    (r"90^\circ", "90"),
    ("90°", r"90^{\circ}"),
    ("90 degrees", r"90^\circ"),
    ("72°F", "72"),
    ("1/2", "0.5"),
    (r"\frac12", "0.5"),
    (r"\dfrac{1}{2}", "1/2"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{1}{-2}", "-0.5"),
    ("½", "0.5"),
    (r"1\frac{1}{2}", "1.5"),
    ("1 1/2", "1.5"),
    ("1½", "3/2"),
    (r"-2\tfrac{1}{4}", "-2.25"),
    (r"3\frac{1}{2}\text{ hours}", "3.5"),
    ("0.333333", "1/3"),
    ("0.6666667", r"\frac{2}{3}"),
    (r"0.\overline{3}", r"\frac{1}{3}"),
    ("1e3", "1000"),
    (r"1.5 \times 10^{3}", "1500"),
    ("10^{-3}", "0.001"),
    (r"10^6", "1,000,000"),
    ("x = 5", "5"),
    ("5", "x = 5"),
    ("x=5", "x = 5"),
    (r"2 + 3 = 5", "5"),
    (r"\text{Total} = 5", "5"),
    (r"\frac{1}{3} \approx 0.33", r"\frac{1}{3}"),
    (r"\frac{22}{7} \approx 3.14", "3.14"),
    ("(5)", "5"),
    (r"\text{42}", "42"),
    (r"$42$", "42"),
    (r"\(42\)", "42"),
    ("twelve", "12"),
    ("101_2", "101"),
    ("3:2", "3:2"),
    ("10^3 m", "1 km"),
    (r"\textbf{12.5\%}", "12.5%"),
    (r"\mathrm{5\,km}", "5000 m"),
    (r"\text{x = 5}", "5"),
    (r"\text{1, 2}", "2, 1"),
    ("3\u00a0000", "3000"),
    ("5\u200b", "5"),
    ("＋５", "5"),
    ("x＝5", "5"),
    ("1，2", "1,2"),
    ("1；2", "1,2"),
    ("0．5％", "0.5%"),
    ("（1,2）", "(1,2)"),
    ("2·3", "6"),
    ("1.5×10³", "1500"),
    ("⅝", "0.625"),
    (r"90\degree", "90"),
    ("`5`", "5"),
    ("2 hundred", "200"),
    ("C$5", "5"),
    ("USD 5", "5"),
    ("5€", "€5"),
    ("13 apples", "thirteen"),
    ("90 kmh", "90 km/h"),
    ("€1{,}250", "1250"),
    (r"1{,}234\text{ m}", "1234"),
    # words
    ("yes", "Yes"),
    (r"\text{Yes.}", "yes"),
    (r"\text{ even }", r"\text{even}"),
    (r"\mathrm{Tuesday}", "Tuesday"),
    ("B", "B"),
    (r"\text{(B)}", "B"),
    (r"\textbf{(B)}\ 5", "B"),
    (r"\textbf{(B)}\ 5", "5"),
    ("B. five apples", "B"),
    (r"\emptyset", r"\text{no solution}"),
    (r"\varnothing", r"\emptyset"),
    ("DNE", "does not exist"),
    ("Bob and Ann", "Ann, Bob"),
    # sets, tuples, intervals
    ("1, 2", "1,2"),
    ("2, 1", "1, 2"),
    (r"\{2, 1\}", "1, 2"),
    (r"\left\{1,\,2\right\}", r"\{1,2\}"),
    ("1 and 2", "1, 2"),
    (r"1 \text{ or } 2", "1,2"),
    ("x = 1, x = 2", "1,2"),
    (r"x=1 \text{ or } x=2", r"\{1, 2\}"),
    (r"x \in \{1,2\}", r"\{1,2\}"),
    ("y = 2, x = 1", "x=1, y=2"),
    ("x=1, y=2", "(1,2)"),
    (r"\pm 2", "2, -2"),
    (r"\{\pm 2, 0\}", "0, 2, -2"),
    (r"\frac{1\pm\sqrt5}{2}", r"\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}"),
    (r"1-\sqrt{2}, 1+\sqrt{2}", r"1\pm\sqrt{2}"),
    (r"\{1/2, 3\}", r"3, \frac{1}{2}"),
    ("100,200,300", "100, 200, 300"),
    ("1,000 and 2,000", "1000, 2000"),
    ("(1, 2)", "(1,2)"),
    (r"\left(\dfrac{1}{2}, -3\right)", "(0.5,-3)"),
    (r"\langle 1, 2, 3\rangle", "(1,2,3)"),
    ("[1, 2)", "[1,2)"),
    (r"(-\infty, 3)", r"(-\infty,3)"),
    ("x < 3", r"(-\infty,3)"),
    (r"[3, \infty)", r"x \ge 3"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty) \cup (-\infty,1)"),
    ("x ≥ 3", r"[3,\infty)"),
    ("(-∞,1)∪(2,∞)", r"(-\infty,1)\cup(2,\infty)"),
    ("x ∈ [1,2]", "[1,2]"),
    (r"\lbrace 1,2\rbrace", r"\{2,1\}"),
    (r"x \in \{\pm 2, 0\}", "0, 2, -2"),
    # algebra
    ("x²", "x^2"),
    ("f’(x)", "f'(x)"),
    ("″even″", "even"),
    ("2√x", r"2\sqrt{x}"),
    ("√(x+1)", r"\sqrt{1+x}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("√12", r"2\sqrt{3}"),
    (r"\sqrt[3]{8}", "2"),
    (r"5\sqrt{2}\text{ cm}", r"5\sqrt{2}"),
    (r"25\pi \text{ cm}^2", r"25\pi"),
    ("2^{10}", "1024"),
    ("5!", "120"),
    (r"\binom{5}{2}", "10"),
    (r"\sqrt{25}", "5 cm"),
    ("x^2+2x+1", "(x+1)^2"),
    ("y = 2x + 1", "2x+1"),
    ("2x+1", "y=2x+1"),
    ("xy", "yx"),
    ("3 + 4i", "4i+3"),
    ("6 - 5 i", "6-5i"),
    (r"\frac12 \le x \le \frac43", r"\left[\frac{1}{2},\frac{4}{3}\right]"),
    ("(-2,3)", "-2 < x < 3"),
    (r"\frac{1}{2}\ln 2", r"\ln\sqrt{2}"),
    (r"\begin{bmatrix} -2 \\ -14 \end{bmatrix}", r"\begin{pmatrix}-2\\-14\end{pmatrix}"),
    (r"\sqrt{2}", "1.41421356"),
    (r"\begin{pmatrix}1 & 2\\ 3 & 4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\boxed{18}", "9 * 2 = 18\n#### 18"),
    ("x+1", r"thus \boxed{1+x}"),
    ("((((((((((((1))))))))))))", "1"),
]

REFUSED = [  # answer, gold
    ("41", "42"),
    ("-42", "42"),
    ("42", "-42"),
    ("4.2", "42"),
    ("420", "42"),
    ("1000001", "1000000"),
    ("1000000.1", "1000000.2"),
    ("0.0000002", "0.0000001"),
    ("1, 234", "1234"),  # two numbers
    ("12 34", "1234"),
    ("3,5", "3.5"),
    ("1,2345", "12345"),
    ("0.333", "1/3"),
    ("0.33", r"\frac{1}{3}"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    ("1/0", "1"),
    (r"1\frac{1}{2}", "11/2"),
    (r"2\frac{1}{2}", "1"),  # no product
    ("50", "0.5"),
    ("5%", "50%"),
    ("0.5%", "50"),
    ("5000", "50%"),
    ("5 km", "5 m"),
    (r"5 \text{ m}", r"5 \text{ m}^2"),
    ("5 cents", "$5"),
    (r"\$5", "€5"),
    ("72°F", "72°C"),
    (r"2 \text{ hours}", r"2 \text{ minutes}"),
    ("5 million", "5"),
    ("5x", "5"),
    ("2c", "2"),
    ("3t", "3"),
    ("2", "2t"),
    ("5 xy", "5"),
    (r"5\pi", "5"),
    ("5i", "5"),
    ("5 squared", "5"),
    ("about 5", "5"),
    ("5 less", "5"),
    ("5 more", "5"),
    ("2+3=6", "5"),
    (r"1\pm\sqrt{3}", r"1\pm\sqrt{2}"),
    ("[-2,3]", "-2<x<3"),
    (r"x \in \{1,2\}", "(1,2)"),
    ("(2,3)", "(2,3),(3,2)"),
    ("Evelyn and Briana", "Evelyn"),
    ("A, C", "A"),
    ("5 and 6", "5"),
    ("5 or 6", "6"),
    ("5 to 6", "5"),
    ("5^2", "5"),
    ("5!", "5"),
    ("101_2", "101_3"),
    ("y = 5", "x = 5"),
    ("4 = 5", "5"),
    (r"41 \approx 50", "50"),
    (r"\sqrt{2}", "1.414"),
    (r"\text{The answer is unknown}", "5"),
    ("3:2", "2:3"),
    ("1e999999999", "5"),
    ("many", "3"),
    ("NaN", "0"),
    # words
    ("no", "yes"),
    ("on", "no"),
    ("silent", "listen"),
    ("not even", "even"),
    ("C", "B"),
    (r"\text{(C)}", "B"),
    ("b", "B"),
    ("Monday", "Tuesday"),
    ("Ann", "Ann, Bob"),
    (r"\{0\}", r"\emptyset"),
    # sets, tuples, intervals
    ("1", "1, 2"),
    ("1, 2, 3", "1, 2"),
    ("1, 1", "1, 2"),
    ("(2, 1)", "(1, 2)"),
    (r"\{1,2\}", "(1,2)"),
    ("(1,2)", r"\{1,2\}"),
    ("[1,2]", "(1,2)"),
    ("(1,2]", "[1,2)"),
    ("1,2", "[1,2]"),
    ("x=2, y=1", "x=1, y=2"),
    (r"\pm 2", "2"),
    ("2", r"\pm 2"),
    (r"(3, \infty)", r"[3,\infty)"),
    ("x > 3", "x < 3"),
    (r"x \le 3", r"(-\infty,3)"),
    # algebra
    ("x^2+1", "(x+1)^2"),
    (r"\sqrt{3}", r"\sqrt{2}"),
    ("2x", "x^2"),
    (r"5\sqrt{2}\text{ cm}", r"5\sqrt{2}\text{ m}"),
    (r"\frac{\pi}{2}", r"90^\circ"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}2&1\end{pmatrix}"),
    (r"\frac{", "42"),
    (r"\frac{}{}", "42"),
    ("{}{}{}", "42"),
    ("7" * 5000, "7"),
    ("x" * 100_000, "42"),
]


@pytest.fixture(scope="module")
def judge():
    judge = MathJudge(workers=1, timeout_s=60)
    yield judge
    judge.close()


def test_every_answer_of_the_table_gets_the_right_verdict(judge):
    boxed = [*((a, g, True) for a, g in ACCEPTED), *((a, g, False) for a, g in REFUSED)]
    cases = [
        *PLACES,
        *WRONG_ALONE.values(),
        *((rf"So \boxed{{{answer}}}.", gold, right) for answer, gold, right in boxed),
    ]
    verdicts = judge.judge([reply for reply, _, _ in cases], [gold for _, gold, _ in cases])
    wrong = [
        (reply[:100], gold, verdict.right, verdict.reason)
        for (reply, gold, right), verdict in zip(cases, verdicts, strict=True)
        if verdict.right is not right
    ]
    assert not wrong


WRONG_ALONE = {  # what our own code is for
    "thoughts are skipped": (r"<think>\boxed{1}</think> \boxed{2}", "2", True),
    "a thought that never ends": (r"<think>it must be \boxed{42}", "42", False),
    "the last box counts": (r"\boxed{41} no, \boxed{42}", "42", True),
    "a box that never closes": (r"\boxed{42} and then \boxed{4", "42", False),
    "hashes after a box": ("\\boxed{41}\n#### 42", "42", True),
    "tags": ("<answer>42</answer>", "42", True),
    "no mark": ("42", "42", False),
    "wide forms": (r"\boxed{（1,2）}", "(1,2)", True),
    "signs beyond ASCII": (r"\boxed{2·3}", "6", True),
    "a root": (r"\boxed{√(x+1)}", r"\sqrt{x+1}", True),
    "fractions in one character": (r"\boxed{1½}", "3/2", True),
    "mixed numbers": (r"\boxed{1 1/2}", "1.5", True),
    "repeating decimals": (r"\boxed{0.\overline{3}}", r"\frac{1}{3}", True),
    "exponents": (r"\boxed{1e3}", "1000", True),
    "digits in lakhs": (r"\boxed{1,00,000}", "100000", True),
    "words for numbers": (r"\boxed{twelve}", "12", True),
    "multipliers": (r"\boxed{2.5 million}", "2500000", True),
    "money": (r"\boxed{\$0.50}", r"50 \text{ cents}", True),
    "percent": (r"\boxed{12.5 percent}", "12.5", True),
    "units": (r"\boxed{5 km}", "5 m", False),
    "units of expressions": (r"\boxed{5\sqrt{2}\text{ cm}}", r"5\sqrt{2}\text{ m}", False),
    "unknown units": (r"\boxed{3 red apples}", "3", True),
    "words that say otherwise": (r"\boxed{5 less}", "5", False),
    "variables named as units": (r"\boxed{2c}", "2", False),
    "bases": (r"\boxed{101_2}", "101_3", False),
    "small numbers": (r"\boxed{0.0000002}", "0.0000001", False),
    "thousands in lists": (r"\boxed{100,200,300}", "100, 200, 300", True),
    "a set is no pair": (r"\boxed{\{1,2\}}", "(1,2)", False),
    "angle brackets": (r"\boxed{\langle 1, 2, 3\rangle}", "(1,2,3)", True),
    "both signs": (r"\boxed{\frac{1\pm\sqrt5}{2}}", r"\frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}", True),
    "contradictions": (r"\boxed{4 = 5}", "5", False),
    "approximations": (r"\boxed{\frac{22}{7} \approx 3.14}", "3.14", True),
    "words": (r"\boxed{silent}", "listen", False),
    "words for the empty set": (r"\boxed{\emptyset}", r"\text{no solution}", True),
    "letters of choices": (r"\boxed{\textbf{(B)}\ 5}", "B", True),
}


@pytest.mark.parametrize(("reply", "gold", "right"), WRONG_ALONE.values(), ids=WRONG_ALONE)
def test_math_verify_alone_would_give_another_verdict(reply, gold, right):
    from math_verify import parse, verify

    gold, reply = (parse(text, parsing_timeout=None) for text in (rf"\boxed{{{gold}}}", reply))
    assert verify(gold, reply, timeout_seconds=None) is not right


FOR_EVER = r"\boxed{(\sin x + \cos x + \tan x + \sqrt{x})^{14}}"

TOO_LARGE = [
    r"9^{9^{9^{9^{9}}}}",
    "9**9**9**9",
    "9^9^9",
    "10000000!",
    "((10!)!)!",
    r"\prod_{n=1}^{10^9} n",
    r"\sum_{n=1}^{10^{12}} \frac{1}{n!}",
    "(a+b+c+d+e)^{200}",
    "(x+y)^{3000}",
    r"\binom{10^9}{5\cdot 10^8}",
    r"(\frac{1}{2})^{10^9}",
    r"e^{e^{e^{e^{10}}}}",
    r"\sin(10^{10^{10}})",
    "2^{1" + "0" * 3900 + "}",
    r"\sqrt{" * 400 + "2" + "}" * 400,
]
WITHIN = [
    "2^{1000}",
    "2^{100000}",
    "10^{10^{2}}",
    "1000!",
    r"\frac{100!}{98!}",
    r"\binom{2024}{1012}",
    r"\binom{10^9}{2}",
    "(x+y+z)^{10}",
    "(1+x)^{100}",
    r"e^{e^{e^{x}}}",
    r"x^{2^{3}}",
    "9" * 4000,
    "1+" * 1900 + "1",
    "6.02 \\times 10^{23}",
]


@pytest.mark.parametrize("answer", TOO_LARGE, ids=lambda answer: answer[:30])
def test_an_answer_too_large_to_evaluate_is_wrong_without_a_worker_unless_the_right_one_is_as_large(answer):
    verdict, question = first_look(rf"\boxed{{{answer}}}", r"2\pi")
    assert (verdict.right, question) == (False, None)
    assert "not evaluated: " in verdict.reason
    assert first_look(rf"\boxed{{{answer}+1}}", f"{answer}+x")[1] is not None
    assert first_look(rf"\boxed{{{answer}}}", answer)[0].right


@pytest.mark.parametrize("answer", WITHIN, ids=lambda answer: answer[:30])
def test_large_answers_that_can_be_evaluated_are(answer):
    assert out_of_reach(answer) is None


@pytest.fixture
def hasty():
    judge = MathJudge(workers=2, timeout_s=1)
    yield judge
    judge.close()


def test_an_answer_that_takes_for_ever_costs_only_itself_in_threads(hasty):
    replies = [r"\boxed{42}", FOR_EVER, r"\boxed{41}"]
    with ThreadPoolExecutor(2) as threads:
        groups = [threads.submit(hasty.judge, replies, "42") for _ in range(2)]
    for group in groups:
        verdicts = group.result()
        right, unscored, wrong = scores(verdicts, right=2.0, wrong=-1.0)
        assert (right, wrong) == (2.0, -1.0)
        assert isinstance(unscored, Unscored)
        assert "no result after 1 s" in str(unscored.fault)


OPERATORS = [
    r"\int_0^{\infty} e^{-x^2} dx",
    r"\iint 1 dx dy",
    r"2\sum_{n=1}^{10} n",
    r"\lim_{x \to 0} \frac{\sin x}{x}",
    r"\prod_{k=2}^{9} k",
]


@pytest.mark.parametrize("answer", OPERATORS)
def test_a_problem_that_is_repeated_in_place_of_its_value_is_wrong_at_once_unless_that_is_the_right_answer(answer):
    verdict, question = first_look(rf"\boxed{{{answer}}}", r"\frac{\sqrt{\pi}}{2}")
    assert (verdict.right, question) == (False, None)
    assert "the answer is not evaluated: \\" in verdict.reason
    assert first_look(rf"\boxed{{{answer} = \frac{{3}}{{7}}}}", r"\frac{3}{7}")[0].right
    assert first_look(rf"\boxed{{1 + {answer}}}", rf"{answer} + 1")[1] is not None


async def test_the_event_loop_runs_while_answers_are_judged_and_a_blocking_judgement_in_it_ends_too(hasty):
    beats = 0

    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    beating = asyncio.create_task(beat())
    assert [verdict.right for verdict in await hasty.judge_async([FOR_EVER], "42")] == [None]
    assert beats > 5
    assert [verdict.right for verdict in hasty.judge([FOR_EVER, "#### 42"], "42")] == [None, True]
    beating.cancel()


async def test_a_cancelled_judgement_ends_its_worker(judge):
    judging = asyncio.create_task(judge.judge_async([FOR_EVER], "42"))
    await asyncio.sleep(0)
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    assert (await judge.judge_async([r"\boxed{\sqrt{1764}}"], "42"))[0].right


def test_plain_answers_never_leave_the_process():
    looks = [first_look(f"<think>so</think> \\boxed{{{answer}}}", "1234") for answer in ("1234", "1,234", "5")]
    assert [(verdict.right, question) for verdict, question in looks] == [(True, None), (True, None), (False, None)]


def test_a_right_answer_that_nobody_can_read_is_no_fault_of_the_replies(judge):
    (verdict,) = judge.judge([r"\boxed{42}"], r"\frac{\begin{cases} 1 \\ ")
    assert verdict.right is None
    assert "nothing that math-verify can read" in verdict.reason


@pytest.mark.parametrize("gold", ["", "  ", "#### ", float("nan"), float("inf")])
def test_without_a_right_answer_nothing_is_judged(gold):
    with pytest.raises(VerifierFault, match="nothing can be judged"):
        first_look(r"\boxed{42}", gold)


def test_without_math_verify_only_plain_answers_are_judged(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    judge = MathJudge(workers=1)
    assert judge.judge([r"\boxed{42}"], "42")[0].right
    with pytest.raises(VerifierFault, match=r"pip install 'atroposlib\[rewards\]'"):
        judge.judge([r"\boxed{x}"], "x+1")


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "\\boxed{1} and ", "}", "{", "#### 1\n", "<answer>", "answer $", "½", " "]
)
@pytest.mark.parametrize("frame", ["%s", r"\boxed{%s}", "#### %s"])
def test_junk_is_wrong_and_no_fault(piece, frame):
    verdict, question = first_look(frame % (piece * (100_000 // len(piece))), "42")
    assert verdict.right is False
    assert question is None


UNITS = {
    "km/h": (("length", 1), ("time", -1)),
    "meters per second": (("length", 1), ("time", -1)),
    "square feet": (("length", 2),),
    "cm^3": (("length", 3),),
    "hours": (("time", 1),),
}


@pytest.mark.parametrize(("name", "dimensions"), UNITS.items(), ids=UNITS)
def test_units_are_read(name, dimensions):
    assert read_unit(name).dimensions == dimensions


def test_words_are_no_units():
    assert read_unit("apples") is None
    assert read_quantity("5 apples").unit is None
    assert read_quantity("5 xy") is None


def test_braces_inside_a_box_may_be_escaped_and_unbalanced():
    assert final_answer(r"\boxed{\left\{ 1, 2 \right.}") == r"\left\{ 1, 2 \right."
    assert last_boxed(r"\boxed{1} then \boxed{a{b}c}") == "a{b}c"
    assert last_boxed(r"\boxed{1} then \boxed{2") is None


def test_answers_are_taken_apart_at_their_outermost_commas():
    assert split_parts(clean(r"\left\{(1,2),\,(3,4)\right\}")).texts == ("(1,2)", "(3,4)")
    assert split_parts("(1, 2,345)").texts == ("1", "2,345")
    assert split_parts("f(1,2)").texts == ("f(1,2)",)
