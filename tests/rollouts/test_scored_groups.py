"""Groups as plain data."""

import asyncio
import math
from collections import UserDict
from contextlib import nullcontext

import numpy as np
import pytest
from counting_env import make_group

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.errors import GroupError, VerifierFault
from atroposlib.rollouts.failures import Unscored
from atroposlib.rollouts.groups import (
    EQUAL_SCORES,
    TOO_FEW_SCORES,
    as_groups,
    check_shape,
    make_rows_plain,
    merge_items,
    reject_reason,
    row_faults,
    share_params,
    to_record,
    unmasked_lengths,
    unscored_response,
    without_rows,
)
from atroposlib.rollouts.source import Work
from atroposlib.rollouts.trace import EngineReply, row_of_group, tracing
from tests.fakes import FakeServer, FakeTokenizer

BROKEN = {
    "no scores": ({"scores": None}, "no scores"),
    "a score too few": ({"scores": [1.0]}, "1 scores"),
}

ODD_ROWS = {
    "a mask too short": ({"masks": [[-100, 1], make_group(5)["masks"][1]]}, "2 mask entries"),
    "a score that is NaN": ({"scores": [math.nan, 1.0]}, "score 0 is nan"),
    "an infinite score": ({"scores": [math.inf, 1.0]}, "score 0 is inf"),
    "no score": ({"scores": [None, 1.0]}, "score 0 is None"),
    "a score that is text": ({"scores": ["good", 1.0]}, "score 0 is 'good'"),
    "a verifier that failed": ({"scores": [0.5 * Unscored(VerifierFault("no verdict")), 1.0]}, "no verdict"),
    "a logprob that is no number": (
        {"inference_logprobs": [[1.0, -1.0, math.nan], [1.0, -1.0, -1.0]]},
        "inference_logprobs of sequence 0",
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_group_nobody_could_use_is_refused_with_what_is_wrong(change, message):
    with pytest.raises(GroupError, match=message):
        check_shape({**make_group(5), **change})


@pytest.mark.parametrize(("change", "message"), ODD_ROWS.values(), ids=ODD_ROWS)
def test_a_row_nobody_could_use_is_set_aside_and_the_rest_is_a_group_of_its_size(change, message):
    group = {**make_group(5), "messages": [["a"], ["b"]], "images": None, **change}
    faults = row_faults(group)
    rest = without_rows(group, faults, group_size=2, note=unscored_response)
    assert {key: rest[key] for key in ("tokens", "scores", "messages", "images", "group_overrides")} == {
        "tokens": group["tokens"][1:],
        "scores": [1.0] if "scores" in change else group["scores"][1:],
        "messages": [["b"]],
        "images": None,
        "group_overrides": {"group_size": 1},
    }
    (said,) = rest["unscored"]
    assert message in said["error"]
    assert said["tokens"] == group["tokens"][0]
    assert set(said["masks"]) == {-100}
    assert set(said["inference_logprobs"]) == {1.0}
    assert reject_reason(rest, group_size=2, distinct_scores=False) is None
    assert reject_reason(rest, group_size=2, distinct_scores=True) == TOO_FEW_SCORES


def test_a_group_of_one_has_nothing_to_compare():
    assert reject_reason(make_group(5, 1), group_size=1, distinct_scores=True) is None


def test_finish_reasons_stay_with_their_rows_when_some_have_no_score():
    work = Work(item=1, key="1", task="t")
    work.trace.record(EngineReply(["stop", "length", "stop"], 10, 20))
    group = {**make_group(1, size=3), "scores": [1.0, None, 0.0]}
    rest = without_rows(group, row_faults(group), group_size=3, note=unscored_response)
    record = to_record(rest, work, env="e", run="r", group_id="g", part=0, parts=1)
    assert record["finish_reasons"] == ["stop", "stop"]
    assert [(said["index"], said["failure"], said["finish_reason"]) for said in record["unscored"]] == [
        (1, "verifier", "length")
    ]


def test_finish_reasons_of_rollouts_that_ran_at_the_same_time_are_put_in_their_order():
    work = Work(item=1, key="1", task="t")
    for row, reason in ((2, "length"), (0, "abort"), (1, "stop"), (0, "tool_calls")):
        with row_of_group(row):
            work.trace.record(EngineReply([reason], 10, 20))
    record = to_record(make_group(1, size=3), work, env="e", run="r", group_id="g", part=0, parts=1)
    assert record["finish_reasons"] == ["tool_calls", "stop", "length"]


class LastFirst(FakeServer):
    """Answers two requests that run at the same time in the other order; the first one's answer is cut."""

    def __init__(self):
        super().__init__("yes")
        self.second_is_answered = asyncio.Event()

    async def tokens_and_logprobs_completion(self, **kwargs):
        is_first = kwargs["max_tokens"] == 1
        if is_first:
            await self.second_is_answered.wait()
        self.finish_reason = "length" if is_first else "stop"
        reply = await super().tokens_and_logprobs_completion(**kwargs)
        self.second_is_answered.set()
        return reply


async def rolled_out_together(rows_of):
    """The record of a group of two requests that an author asked for together; `rows_of` makes rows of their ids."""
    managed = ManagedServer(LastFirst(), FakeTokenizer())
    with tracing() as trace:
        await asyncio.gather(*(managed.completion(prompt=f"{n}", max_tokens=n) for n in (1, 2)))
        nodes = sorted(managed.get_state()["nodes"], key=lambda node: node.full_text)
    tokens = rows_of([node.tokens for node in nodes])
    group = {"tokens": tokens, "masks": tokens, "scores": [1.0, 0.0]}
    work = Work(item=1, key="1", task="t", trace=trace)
    return to_record(group, work, env="e", run="r", group_id="g", part=0, parts=1)


async def test_finish_reasons_go_with_the_ids_of_their_rows_whichever_reply_came_first():
    assert (await rolled_out_together(lambda rows: rows))["finish_reasons"] == ["length", "stop"]
    assert (await rolled_out_together(lambda rows: rows[::-1]))["finish_reasons"] == ["stop", "length"]


async def test_finish_reasons_of_ids_that_nobody_knows_are_left_out_where_replies_came_in_any_order():
    record = await rolled_out_together(lambda rows: [[*row, 7] for row in rows])
    assert record["finish_reasons"] is None


@pytest.mark.parametrize("place", [nullcontext, lambda: row_of_group(0)], ids=["rows not told", "rows told"])
async def test_a_response_of_several_turns_ended_as_its_last_turn_did(place):
    server = FakeServer("yes")
    managed = ManagedServer(server, FakeTokenizer())
    messages = [{"role": "user", "content": "one"}]
    with tracing() as trace, place():
        for reason in ("stop", "length"):
            server.finish_reason = reason
            reply = await managed.chat_completion(messages=messages, max_tokens=3)
            said = {"role": "assistant", "content": reply.choices[0].message.content}
            messages = [*messages, said, {"role": "user", "content": "two"}]
        row = managed.get_state()["nodes"][-1].tokens
    work = Work(item=1, key="1", task="t", trace=trace)
    group = {"tokens": [row], "masks": [row], "scores": [1.0]}
    record = to_record(group, work, env="e", run="r", group_id="g", part=0, parts=1)
    assert (trace.finish_reasons, record["finish_reasons"]) == (["stop", "length"], ["length"])


async def test_finish_reasons_of_requests_one_after_the_other_keep_their_order():
    work = Work(item=1, key="1", task="t")
    for reason in ("length", "stop"):
        work.trace.record(EngineReply([reason], 10, 20))
    record = to_record(make_group(1), work, env="e", run="r", group_id="g", part=0, parts=1)
    assert record["finish_reasons"] == ["length", "stop"]


def test_what_rollouts_were_generated_with_is_kept():
    item = {"tokens": [1], "masks": [1], "scores": 1.0}
    rows = [{"temperature": t, "top_p": 0.9} for t in (0.5, 1.0)]
    group = merge_items([{**item, "generation_params": row} for row in rows])
    share_params(group)
    assert group["generation_params"] == {"top_p": 0.9}
    assert group["overrides"] == [{"temperature": 0.5}, {"temperature": 1.0}]


class Encoding(UserDict):
    """As transformers' BatchEncoding."""


ROWS = {
    "a list": [1, 2, 3],
    "a tuple": (1, 2, 3),
    "an array": np.array([1, 2, 3]),
    "a batch of one": np.array([[1, 2, 3]]),
    "whole numbers as floats": [1.0, 2, np.float64(3)],
    "numpy's integers": [np.int64(1), 2, 3],
    "an encoding": Encoding(input_ids=[1, 2, 3], attention_mask=[1, 1, 1]),
    "an encoding of arrays": Encoding(input_ids=np.array([[1, 2, 3]])),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rows_become_lists_of_integers(row):
    group = {"tokens": [row, [4]], "masks": [row, [4]], "scores": [1.0, 0.0]}
    assert make_rows_plain(group) == {}
    assert group["tokens"] == group["masks"] == [[1, 2, 3], [4]]
    assert {type(value) for row in group["tokens"] for value in row} == {int}


NO_ROWS = {
    "text": "<|im_start|>",
    "ids as text": ["1", "2"],
    "parts of numbers": [1.5],
    "truth": [True, False],
    "truth in an array": np.array([True]),
    "no number": [float("nan")],
    "nothing": [None],
    "a dictionary": {"attention_mask": [1]},
    "a batch of two": [[1], [2]],
    "a number": 5,
}


@pytest.mark.parametrize("row", NO_ROWS.values(), ids=NO_ROWS)
@pytest.mark.parametrize("key", ["tokens", "masks"])
def test_what_is_no_row_of_integers_is_a_fault_of_that_row_with_its_place(key, row):
    group = {"tokens": [[4], [4]], "masks": [[4], [4]], "scores": [1.0, 0.0], key: [[4], row]}
    faults = make_rows_plain(group)
    assert list(faults) == [1]
    assert f"{key}[1]" in str(faults[1])
    rest = without_rows(group, faults, group_size=2, note=unscored_response)
    assert (rest["tokens"], rest["masks"]) == ([[4]], [[4]])


def test_a_row_without_tokens_is_left_out():
    group = make_group(5, size=3)
    group["tokens"][1], group["masks"][1] = [], []
    faults = row_faults(group)
    assert list(faults) == [1]
    rest = without_rows(group, faults, group_size=3, note=unscored_response)
    assert len(rest["tokens"]) == 2
    assert reject_reason(rest, group_size=3, distinct_scores=False) is None


def test_numpy_groups_are_fine():
    check_shape({"tokens": np.ones((2, 3), int), "masks": np.ones((2, 3), int), "scores": np.array([0.0, 1.0])})


def test_the_size_is_the_groups_own_when_it_says_so():
    group = {**make_group(1, size=3), "group_overrides": {"group_size": 3}}
    assert reject_reason(group, group_size=2, distinct_scores=False) is None
    assert reject_reason(make_group(1, size=3), group_size=2, distinct_scores=False) == "3 sequences instead of 2"


def test_group_overrides_may_be_null():
    assert reject_reason({**make_group(1), "group_overrides": None}, group_size=2, distinct_scores=True) is None


def test_equal_scores_are_dropped_only_when_asked():
    group = {**make_group(1), "scores": [1.0, 1]}
    assert reject_reason(group, group_size=2, distinct_scores=True) == EQUAL_SCORES
    assert reject_reason(group, group_size=2, distinct_scores=False) is None


RESULTS = {"nothing": (None, 0), "a group": (make_group(1), 1), "a list with holes": ([make_group(1), None], 1)}


@pytest.mark.parametrize(("result", "count"), RESULTS.values(), ids=RESULTS)
def test_what_collect_trajectories_may_return(result, count):
    assert len(as_groups(result)) == count


def test_anything_else_is_an_error_that_shows_it():
    with pytest.raises(GroupError, match="returned str 'oops'"):
        as_groups("oops")


def test_merging_keeps_logprobs_and_distillation_and_leaves_absent_keys_away():
    item = {
        "tokens": [1, 2],
        "masks": [-100, 2],
        "scores": 1.0,
        "inference_logprobs": [1.0, -0.5],
        "distill_token_ids": [[1], [2]],
        "distill_logprobs": [[-1.0], [-1.0]],
        "group_overrides": {"a": 1},
    }
    merged = merge_items([item, {**item, "scores": 0.0, "group_overrides": {"b": 2}}])
    assert merged == {
        "tokens": [[1, 2]] * 2,
        "masks": [[-100, 2]] * 2,
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, -0.5]] * 2,
        "distill_token_ids": [[[1], [2]]] * 2,
        "distill_logprobs": [[[-1.0], [-1.0]]] * 2,
        "group_overrides": {"a": 1, "b": 2},
    }


def test_half_a_group_with_logprobs_is_refused():
    item = {"tokens": [1], "masks": [1], "scores": 1.0}
    with pytest.raises(GroupError, match="1 of 2 rollouts of the group have 'inference_logprobs'"):
        merge_items([item, {**item, "inference_logprobs": [1.0]}])


def test_trained_positions_are_counted():
    assert unmasked_lengths(make_group(1)) == [2, 2]


def test_a_record_tells_where_the_group_came_from_and_what_the_engine_did():
    work = Work(item={"number": 7}, key="7", task="sorting")
    work.trace.record(EngineReply(["stop", "length"], 10, 20, model="m", weight_version="w1", sampling={"n": 2}))
    record = to_record(make_group(7), work, env="counting", run="main", group_id="g", part=0, parts=1)
    assert list(record)[:3] == ["schema_version", "env", "run"]
    assert record["finish_reasons"] == ["stop", "length"]
    assert record["usage"] == {"prompt_tokens": 10, "completion_tokens": 20, "length_tokens": 2}
    assert (record["task"], record["item_key"], record["sampling"]) == ("sorting", "7", {"n": 2})
    assert record["engine"]["weight_version_end"] == "w1"


def test_finish_reasons_are_left_out_when_they_cannot_be_told_apart():
    work = Work(item=1, key="1", task="t")
    work.trace.record(EngineReply(["stop"] * 6, 10, 20))
    record = to_record(make_group(1), work, env="e", run="r", group_id="g", part=0, parts=1)
    assert record["finish_reasons"] is None


def test_the_groups_own_task_wins():
    record = to_record(
        {**make_group(1), "task": "mixed/real"}, Work(1, "1", "t"), env="e", run="r", group_id="g", part=0, parts=1
    )
    assert record["task"] == "mixed/real"
