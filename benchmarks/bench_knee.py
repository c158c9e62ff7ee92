"""Does `max_num_workers: auto` find what a live engine is best at? Fixed numbers of groups at once first, then auto.

    python -m benchmarks.bench_knee http://127.0.0.1:9000 --model /path/of/model [--fixed 2 4 8 16 32 64 96]

Groups of 16 answers of about `tokens` new tokens (`--spread`), each through `process`. Printed: tokens per second at
each fixed number, then what auto chooses as it does so, and at the end how many groups it had in flight and what it
delivered, every `--step` seconds.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

from benchmarks.bench_clients import GROUP, Load, Spans, flush, framework, sized


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", required=True, help="Model folder (its tokenizer is used).")
    parser.add_argument("--fixed", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 96], help="Groups at once.")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--spread", type=float, default=0.5, help="Share by which lengths differ from --tokens.")
    parser.add_argument("--seconds", type=float, default=8, help="Of a fixed number.")
    parser.add_argument("--auto-seconds", type=float, default=60, help="Bound of auto: no group begins later.")
    parser.add_argument("--auto-runs", type=int, default=1, help="Times that auto starts from the beginning.")
    parser.add_argument("--step", type=float, default=5, help="Seconds of one line of auto.")
    args = parser.parse_args()
    load = Load([args.url], args.model, 1, args.tokens, args.spread)
    rates: dict[int, float] = {}
    print("| groups at once | tok/s |\n|---|---|")
    for slots in args.fixed:
        spans = _run(sized(replace(load, slots=slots), args.seconds))
        rates[slots] = spans.rate(spans.handing_out())
        print(f"| {slots} | {rates[slots]:,.0f} |", flush=True)
    knee = max(rates, key=lambda slots: rates[slots])
    best = rates[knee]
    for _ in range(args.auto_runs):
        groups = 4 * int(best * args.auto_seconds / args.tokens / GROUP)  # more than auto can do in that time
        _auto(replace(load, slots="auto", groups=groups, stop_after_s=args.auto_seconds), best, args.step)


def _auto(load: Load, best: float, step_s: float) -> None:
    started = time.time()
    print("\nauto: ", end="")
    spans = _run(load, lambda when, limit: print(f"{limit} at {when - started:.0f} s", end=", ", flush=True))
    print(f"\n\n| auto after s | groups at once | tok/s | share of {best:,.0f} |\n|---|---|---|---|")
    start, ended = spans.handing_out()
    for step in range(int((ended - start) / step_s)):
        window = start + step * step_s, start + (step + 1) * step_s
        rate = spans.rate(window)
        print(f"| {window[1] - start:.0f} | {spans.busy(window):.1f} | {rate:,.0f} | {rate / best:.2f} |")
    for begin, end in ((0.0, 60.0), (60.0, load.stop_after_s or 0.0)):
        if start + begin < min(ended, start + end):
            window = start + begin, min(ended, start + end)
            print(f"from {begin:.0f} s to {window[1] - start:.0f} s: {spans.rate(window) / best:.3f} of the best")


def _run(load: Load, on_limit: Callable[[float, int], None] = lambda when, limit: None) -> Spans:
    flush(load)
    return framework("process", load, on_limit)


if __name__ == "__main__":
    main()
