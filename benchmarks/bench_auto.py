"""Print what `max_num_workers: auto` reaches on simulated engines.

    python -m benchmarks.bench_auto [--seeds 5]

The curves are those of `tests/rollouts/test_auto_concurrency.py`, in simulated time, one engine for each seed; printed
are the lowest and the median share of the best fixed number of groups, from rates alone.
"""

import argparse
import statistics
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "tests" / "rollouts"
WINDOWS_S = ((60.0, 120.0), (60.0, 660.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="engines of each curve")
    seeds = parser.parse_args().seeds
    sys.path[:0] = [str(SCRIPTS)]
    from simulated_engine import Engine  # pyright: ignore[reportMissingImports]
    from test_auto_concurrency import CURVES  # pyright: ignore[reportMissingImports]

    print("| engine | second minute: lowest | median | minutes 2 to 11: lowest | median |\n|---|---|---|---|---|")
    for name, (curve, best, *_) in CURVES.items():
        engines = [Engine(curve, seed=100 + seed).run(660) for seed in range(seeds)]
        columns = [sorted(engine.given(*window) / best for engine in engines) for window in WINDOWS_S]
        cells = [f"{column[0]:.2f} | {statistics.median(column):.2f}" for column in columns]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
