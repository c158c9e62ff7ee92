"""Does `max_num_workers: auto` find what a live engine is best at? Fixed numbers of groups at once first, then auto.

    python -m benchmarks.bench_knee http://127.0.0.1:9000 --model /path/of/model [--fixed 2 4 8 16 32 64 96]

Groups of 16 answers of about `tokens` new tokens (`--spread`), each through `process`. Printed: tokens per second at
each fixed number, then how many groups auto had in flight and what it delivered, every `--step` seconds.
"""

import argparse
from dataclasses import replace

from benchmarks.bench_clients import Load, Spans, flush, framework, sized


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", required=True, help="Model folder (its tokenizer is used).")
    parser.add_argument("--fixed", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 96], help="Groups at once.")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--spread", type=float, default=0.5, help="Share by which lengths differ from --tokens.")
    parser.add_argument("--seconds", type=float, default=8, help="Of a fixed number.")
    parser.add_argument("--auto-seconds", type=float, default=60)
    parser.add_argument("--step", type=float, default=5, help="Seconds of one line of auto.")
    args = parser.parse_args()
    load = Load(args.url, args.model, 1, args.tokens, args.spread)
    rates: dict[int, float] = {}
    print("| groups at once | tok/s |\n|---|---|")
    for slots in args.fixed:
        spans = _run(sized(replace(load, slots=slots), args.seconds))
        rates[slots] = spans.rate(spans.handing_out())
        print(f"| {slots} | {rates[slots]:,.0f} |", flush=True)
    knee = max(rates, key=lambda slots: rates[slots])
    best = rates[knee]
    spans = _run(replace(sized(replace(load, slots=knee), args.auto_seconds), slots="auto"))
    print(f"\n| auto after s | groups at once | tok/s | share of {best:,.0f} |\n|---|---|---|---|")
    start, ended = spans.handing_out()
    for step in range(int((ended - start) / args.step)):
        window = start + step * args.step, start + (step + 1) * args.step
        rate = spans.rate(window)
        print(f"| {window[1] - start:.0f} | {spans.busy(window):.1f} | {rate:,.0f} | {rate / best:.2f} |")
    print("limits: " + ", ".join(f"{limit} at {when - start:.0f} s" for when, limit in spans.limits))


def _run(load: Load) -> Spans:
    flush(load)
    return framework("process", load)


if __name__ == "__main__":
    main()
