"""Measure the judge of mathematics: judgements per second on plain GSM8K answers and on LaTeX ones.

python -m benchmarks.bench_judge
"""

import os
import time

from atroposlib.envs.reward_fns.math_judge import MathJudge

THOUGHT = "<think>" + "Half of 2,468 is 1,234, which I check once more. " * 80 + "</think>\n"
PLAIN = [
    (THOUGHT + f"She sells \\boxed{{{answer}}} clips.", str(gold))
    for gold in range(1000, 1050)
    for answer in (gold, f"{gold:,}", gold + 1, rf"\${gold}")
]
LATEX = [
    (THOUGHT + f"So \\boxed{{{answer}}}.", gold)
    for n in range(2, 52)
    for answer, gold in (
        (rf"\frac{{\sqrt{{{n}}}}}{{{n}}}", rf"\frac{{1}}{{\sqrt{{{n}}}}}"),
        (f"x^2+{2 * n}x+{n * n}", f"(x+{n})^2"),
        (rf"(-\infty, {n}]", rf"x \le {n}"),
        (rf"{n}\pi", rf"{n + 1}\pi"),
    )
]


def main() -> None:
    """Print rates and CPU per judgement, workers included."""
    judge = MathJudge(workers=2)
    judge.judge([r"\boxed{\sqrt{4}}"] * 2, ["2", "3"])  # both workers have imported math-verify
    for name, cases in (("plain", PLAIN), ("LaTeX", LATEX)):
        begun, used = time.perf_counter(), os.times()
        for start in range(0, len(cases), 16):
            group = cases[start : start + 16]
            verdicts = judge.judge([reply for reply, _ in group], [gold for _, gold in group])
            assert all(verdict.right is not None for verdict in verdicts)
        wall, now = time.perf_counter() - begun, os.times()
        cpu_ms = 1e3 * (now.user - used.user) / len(cases)
        print(f"{name}: {len(cases) / wall:,.0f} judgements/s, {cpu_ms:.3f} ms CPU each, workers aside")
    judge.close()


if __name__ == "__main__":
    main()
