"""Is the engine the bottleneck? The same groups through a bare client, `process`, and `serve` with API and trainer.

    python -m benchmarks.bench_sglang http://127.0.0.1:9000 --model /path/of/model [--side-by-side]

Every run: groups of 16 answers, `tokens` new tokens each (ignore_eos), log-probabilities on, at most `concurrency`
sequences in flight. With `--spread 0.5` each group has a length of its own, 50 to 150% of `tokens`: when all are equal,
all slots end and begin at the same moment, and SGLang computes their prompts together, which no real workload lets it
do. Tokens per second are those made while there is work to hand out, from the first to the last start of a group.

The ways take turns `repeat` times. The ratio of a run is to the bare client (aiohttp, one request per group, replies
parsed with orjson) of the same turn; a row has the median. An engine's speed differs by a third from one run to the
next, so `--side-by-side` runs each way at the same time as a bare client, with half of the sequences in flight each:
both meet the same engine in the same moments, and the ratio is that of the two. `bare` next to itself shows the noise.

Slots: share of a way's slots with a group being generated. CPU: cores busy on average; the engine's also while the
environment starts. The ways `responses` and `tokens` are `process` with that `response_journal`.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bench_clients import CPU, GROUP, Load, bare, both, flush, framework, side_by_side, sized

WAYS = ("bare", "process", "serve", "responses", "tokens")


@dataclass(frozen=True)
class Run:
    """One measurement."""

    way: str
    concurrency: int
    new_tokens: int
    rate: float  # new tokens per second
    reference: float  # that of the bare client
    occupancy: float  # of the slots
    cores: dict[str, float]  # process -> cores busy

    @property
    def ratio(self) -> float:
        return self.rate / self.reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="URL", help="Of the engine, or of several that share the work.")
    parser.add_argument("--model", required=True, help="Model folder (its tokenizer is used).")
    parser.add_argument("--server-pid", type=int, help="Of the server, to tell its CPU.")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256, 1024], help="Multiples of 32.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--ways", nargs="+", default=["bare", "process", "serve"], choices=WAYS, help="bare first.")
    parser.add_argument("--side-by-side", action="store_true", help="Each way at the same time as a bare client.")
    parser.add_argument("--spread", type=float, default=0.0, help="Share by which lengths differ from --tokens.")
    parser.add_argument("--seconds", type=float, default=8, help="Of one run; never fewer than four answers per slot.")
    parser.add_argument("--repeat", type=int, default=3, help="Runs of every way.")
    parser.add_argument("--processes", type=int, default=1, help="Environment processes that share the work.")
    parser.add_argument("--out", type=Path, help="All runs as JSON.")
    args = parser.parse_args()
    if not args.side_by_side and args.ways[0] != "bare":
        parser.error("without --side-by-side the first of --ways must be bare: the others are compared with it")
    runs: list[Run] = []
    for new_tokens, concurrency in itertools.product(args.tokens, args.concurrency):
        slots = concurrency // GROUP // (2 if args.side_by_side else 1)
        load = sized(Load(args.urls, args.model, slots, new_tokens, args.spread, args.processes), args.seconds)
        for _ in range(args.repeat):
            reference = 0.0
            for way in args.ways:
                run = _measure(way, load, concurrency, reference, paired=args.side_by_side, server_pid=args.server_pid)
                reference = run.rate if way == "bare" else reference
                runs.append(run)
                print(f"{way} {concurrency} x {new_tokens}: {run.rate:,.0f} tok/s, {run.ratio:.3f}", flush=True)
                if args.out:
                    args.out.write_text(json.dumps([asdict(each) for each in runs], indent=1), "utf-8")
    print(table(runs))


def table(runs: Sequence[Run]) -> str:
    """Markdown; runs of one way and the same conditions are one row."""
    rows: dict[tuple[int, int, str], list[Run]] = {}
    for run in runs:
        rows.setdefault((run.concurrency, run.new_tokens, run.way), []).append(run)
    head = [
        "| sequences in flight | new tokens | way | tok/s | ratio | each run | slots | cores busy |",
        "|" + "---|" * 8,
    ]
    return "\n".join(head + [line(same) for same in rows.values()])


def line(runs: Sequence[Run]) -> str:
    """One row of the table."""
    rate = statistics.median(run.rate for run in runs)
    ratio = statistics.median(run.ratio for run in runs)
    each = ", ".join(f"{run.ratio:.3f}" for run in runs)
    slots = statistics.median(run.occupancy for run in runs)
    cores = ", ".join(f"{name} {statistics.median(run.cores[name] for run in runs):.2f}" for name in runs[0].cores)
    cells = (runs[0].concurrency, runs[0].new_tokens, runs[0].way, f"{rate:,.0f}", f"{ratio:.3f}", each)
    return "| " + " | ".join(map(str, (*cells, f"{slots:.3f}", cores))) + " |"


def _measure(way: str, load: Load, concurrency: int, reference: float, *, paired: bool, server_pid: int | None) -> Run:
    flush(load)
    server, started = CPU(server_pid), time.time()
    if paired:
        spans, other = side_by_side(way, load)
        window = both(spans, other)
        reference = other.rate(window)
    else:
        spans = bare(load) if way == "bare" else framework(way, load)
        window = spans.handing_out()
    rate = spans.rate(window)
    cores = spans.cores() | {"engine": server.since() / (time.time() - started)}
    occupancy = spans.busy(window) / int(load.slots)
    return Run(way, concurrency, load.new_tokens, rate, reference or rate, occupancy, cores)


if __name__ == "__main__":
    main()
