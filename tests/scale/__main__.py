"""The scale run: `python -m tests.scale --problems 50000` kills, breaks and checks a whole datagen run; prints a table.

Sizes, speeds and faults are arguments; the defaults are those of `make bench-scale`.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.scale.drill import Drill, Plan
from tests.scale.report import check_exact, figures

DEFAULTS = Plan(
    problems=50_000,
    responses=16,
    workers=256,
    slots=1024,
    tps=18.0,
    tokens=64.0,
    max_tokens=160,
    kills=20,
    outage_s=60.0,
    error_rate=0.02,
    drop_rate=0.01,
    too_long_every=20,
    deadline_s=7200.0,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Plan):
        default = getattr(DEFAULTS, field.name)
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(default), default=default)
    parser.add_argument("--folder", type=Path, default=None, help="kept, with logs; default: a temporary one")
    options = vars(parser.parse_args())
    kept = options.pop("folder")
    folder = kept or Path(tempfile.mkdtemp(prefix="atropos-scale-"))
    drill = Drill(folder, Plan(**options))
    drill.run()
    began = time.monotonic()
    check_exact(drill)
    print(f"exact; checked in {time.monotonic() - began:.0f} s", file=sys.stderr)
    result = figures(drill)
    (folder / "figures.json").write_text(json.dumps(dataclasses.asdict(result), indent=1))
    print("\n".join(result.lines()))
    if kept is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
