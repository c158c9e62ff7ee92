"""The scale run in small: every process killed, everything at once, an outage, faults; exact, and the same bytes.

`python -m tests.scale` is the long form.
"""

from dataclasses import replace

import pytest

from tests.scale.drill import VICTIMS, Drill, Plan
from tests.scale.report import check_exact, figures

SMALL = Plan(problems=120, responses=4, workers=16, slots=32, tokens=40.0, max_tokens=64, too_long_every=20)
FAULTS = {"tps": 80.0, "outage_s": 2.0, "error_rate": 0.02, "drop_rate": 0.01, "deadline_s": 280.0}


def finished(folder, **changes) -> Drill:
    drill = Drill(folder, replace(SMALL, **changes))
    drill.run()
    check_exact(drill)
    return drill


@pytest.mark.parametrize(("journal", "kills"), [("tokens", len(VICTIMS)), ("off", 2)])
def test_a_run_whose_processes_are_killed_gives_the_dataset_of_one_that_was_left_alone(tmp_path, journal, kills):
    disturbed = figures(finished(tmp_path / "disturbed", journal=journal, kills=kills, **FAULTS))
    assert disturbed.breaks == {**dict.fromkeys(VICTIMS[:kills], 1), "outage": 1}
    left_alone = figures(finished(tmp_path / "left_alone", journal=journal))
    assert disturbed.sha256 == left_alone.sha256
