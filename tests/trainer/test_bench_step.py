"""The step's benchmark on a tiny model: what it trains, and what it prints. Times are not looked at."""

from types import SimpleNamespace

import pytest

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.policy import pick_device
from benchmarks.bench_step import WARM_UP, Timing, Work, make_rows, measure, table, time_ours


@pytest.fixture
def work(tiny_model):
    return Work(
        tiny_model, pick_device("cpu"), sequences=8, group=4, prompt=12, completion=4, steps=1, objective="grpo"
    )


def test_the_responses_of_a_group_share_their_prompt_and_only_they_are_trained(work):
    rows = make_rows(work, vocabulary=64)
    prompts = {(row.group, tuple(row.tokens[: work.prompt])) for row in rows}
    assert sorted(group for group, _ in prompts) == [0, 1]
    assert {row.trained_tokens for row in rows} == {work.completion}
    assert len({row.score for row in rows}) == work.sequences


def test_both_ways_of_laying_out_a_batch_give_the_same_gradient(work):
    rows = make_rows(work, vocabulary=64)
    shared, alone = (time_ours(work, rows, 64, share_prompts=share) for share in (True, False))
    assert shared.norms[0] == pytest.approx(alone.norms[0], rel=1e-4)
    assert len(shared.seconds) == WARM_UP + work.steps
    assert all(0 < sum(parts) <= sum(shared.seconds) for parts in shared.parts.values())
    assert shared.peak_bytes > 2**20


def test_a_row_of_the_table_leaves_the_warm_up_out(work):
    timing = Timing("ours", peak_bytes=2**30, norms=[1.5])
    for seconds in [100.0] * WARM_UP + [2.0]:
        timing.add(seconds, seconds * 2, {"forward": seconds / 2, "backward": seconds / 4, "optimizer": 0.5})
    assert "| ours | 2.000 | 4.000 | 64 | 1.000 | 0.500 | 0.500 | 1.00 | 1.5 |" in table(work, [timing])


def test_sequences_that_are_no_whole_groups_are_refused():
    with pytest.raises(ConfigError, match="--sequences 10 is not a multiple of --group 4"):
        measure(SimpleNamespace(sequences=10, group=4))
