import numpy as np
import pytest
import torch
from tiny_model import make_group

from atroposlib.errors import DataError
from atroposlib.example_trainer.data import pad_data_to_good_offset, rows_of
from atroposlib.example_trainer.layout import collate, line_length, micro_batches, rounded_length, token_advantages


def rows(*groups, seq_len=64):
    return rows_of(list(groups), seq_len=seq_len, temperature=1.0)


def test_position_t_predicts_token_t_plus_one():
    group = {
        "tokens": [[5, 6, 7, 8]],
        "masks": [[-100, -100, 7, 8]],
        "scores": [1.0],
        "inference_logprobs": [[1, 1, -0.7, -0.8]],
    }
    micro = collate(rows(group), [[0]])
    assert micro.input_ids.tolist() == [[5, 6, 7, 8]]
    assert micro.targets.tolist() == [[6, 7, 8]]
    assert micro.mask.tolist() == [[0, 1, 1]]
    torch.testing.assert_close(micro.infer_logp, torch.tensor([[0, -0.7, -0.8]]))
    assert micro.predictors.tolist() == [[0, 1, 2]]


def test_shorter_rows_are_padded_on_the_right_where_nothing_attends_to_them():
    micro = collate(rows(make_group([1, 0], completions=[2, 5])), [[0], [1]])
    assert micro.attention_mask is micro.position_ids is None
    assert micro.input_ids[0, 5:].tolist() == [0, 0, 0]
    assert micro.mask.sum(1).tolist() == [2, 5]


def test_a_null_for_inference_logprobs_is_unknown_not_an_error():
    group = make_group([1, 0]) | {"inference_logprobs": None}
    micro = collate(rows(group), [[0]])
    assert micro.infer_logp[micro.mask > 0].isnan().all()
    assert (micro.infer_logp[micro.mask == 0] == 0).all()


def test_arrays_of_the_binary_form_are_read_like_lists():
    group = make_group([1, 0])
    arrays = {key: [np.array(line) for line in group[key]] for key in ("tokens", "masks", "inference_logprobs")}
    plain, binary = rows(group)[1], rows(group | arrays)[1]
    assert plain.tokens.tolist() == binary.tokens.tolist()
    assert plain.trained.tolist() == binary.trained.tolist()


TEMPERATURES = {
    "the row's override wins": ({"overrides": [{"temperature": 0.5}], "generation_params": {"temperature": 0.7}}, 0.5),
    "then generation_params": ({"generation_params": {"temperature": 0.7}, "group_overrides": {"temperature": 2}}, 0.7),
    "then group_overrides": ({"group_overrides": {"temperature": 2}}, 2.0),
    "then the default": ({"generation_params": None, "overrides": None}, 1.0),
    "greedy counts as 1": ({"generation_params": {"temperature": 0}}, 1.0),
}


@pytest.mark.parametrize(("extra", "expected"), TEMPERATURES.values(), ids=TEMPERATURES)
def test_temperature_of_a_row(extra, expected):
    assert rows(make_group([1.0], **extra))[0].temperature == expected


def test_a_sequence_above_seq_len_is_refused_with_both_lengths():
    with pytest.raises(DataError, match="sequence 0 of group 0 has 7 tokens, the trainer takes 6"):
        rows(make_group([1.0]), seq_len=6)


def test_fields_of_another_length_are_refused():
    group = make_group([1.0]) | {"inference_logprobs": [[-1.0]]}
    with pytest.raises(DataError, match="has 7 tokens but 1 inference_logprobs"):
        rows(group)


GARBAGE = {
    "fewer lists than rows": {"inference_logprobs": [[-1.0] * 7]},
    "fewer advantages than rows": {"advantages": [[1.0] * 7]},
    "fewer overrides than rows": {"overrides": [{}]},
    "a temperature that is a word": {"generation_params": {"temperature": "hot"}},
    "a temperature that is a list": {"group_overrides": {"temperature": [1]}},
    "overrides that are none": {"overrides": [[], ["sft"]]},
    "numbers that are none": {"inference_logprobs": [["a"] * 7, ["b"] * 8]},
    "a teacher without lists": {"distill_token_ids": [[1] * 7] * 2, "distill_logprobs": [[-1.0] * 7] * 2},
}


@pytest.mark.parametrize("extra", GARBAGE.values(), ids=GARBAGE)
def test_garbage_that_the_api_lets_pass_is_named(extra):
    with pytest.raises(DataError, match=r"sequence [01] of group 0 "):
        rows(make_group([1, 0], **extra))


def test_a_row_without_tokens_is_no_reason_to_end():
    found = rows(make_group([1, 0]) | {"tokens": [[], [3, 4]], "masks": [[], [-100, 4]], "inference_logprobs": None})
    assert [(len(row.trained), row.trained_tokens) for row in found] == [(0, 0), (2, 1)]
    assert collate(found, [[0], [1]]).mask.tolist() == [[0], [1]]


def test_micro_batches_hold_every_row_once_within_the_budget():
    found = rows(*[make_group([1, 0, 1], completions=[1, 9, 20], seed=s) for s in range(4)])
    batches = micro_batches(found, max_tokens=40)
    assert sorted(i for batch in batches for line in batch for i in line) == list(range(12))
    assert all(len(batch) * max(line_length(found, line) for line in batch) <= 40 for batch in batches)


@pytest.mark.parametrize("budget", [10**6, 120, 64, 40, 21])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_processes_share_a_step_evenly(size, budget):
    found = rows(*[make_group([1, 0, 1, 0], completions=[1, 9, 20, 5], seed=s) for s in range(6)])
    batches = micro_batches(found, max_tokens=budget, share=False, multiple_of=size)
    assert sorted(i for batch in batches for line in batch for i in line) == list(range(24))
    padded = [len(batch) * max(line_length(found, line) for line in batch) for batch in batches]
    assert max(padded) <= max(budget, max(len(row.tokens) for row in found))
    work = [sum(padded[rank::size]) for rank in range(size)]
    assert max(work) - min(work) <= max(padded)
    assert max(work) <= 1.5 * sum(len(row.tokens) for row in found) / size


def test_a_row_above_the_budget_comes_alone():
    found = rows(make_group([1, 0], completions=[30, 30]))
    assert micro_batches(found, max_tokens=10) == [[[0]], [[1]]]


def shared_group(scores, *, prompt, completions):
    group = make_group(scores, prompt=prompt, completions=completions)
    for ids in group["tokens"]:
        ids[:prompt] = range(10, 10 + prompt)
    return group


def test_responses_shorter_than_their_prompt_share_a_line():
    found = rows(shared_group([1, 0, 1], prompt=12, completions=[3, 5, 4]))
    assert micro_batches(found, max_tokens=100) == [[[0, 1, 2]]]
    assert line_length(found, [0, 1, 2]) == 12 + 3 + 5 + 4
    assert micro_batches(found, max_tokens=100, share=False) == [[[1], [2], [0]]]


def test_responses_longer_than_their_prompt_do_not():
    found = rows(shared_group([1, 0], prompt=6, completions=[7, 8]))
    assert micro_batches(found, max_tokens=100) == [[[1], [0]]]


def test_a_line_of_several_rows_keeps_each_row_as_if_alone():
    found = rows(shared_group([1, 0], prompt=3, completions=[2, 2]))
    micro = collate(found, [[0, 1]])
    first, second = found[0].tokens.tolist(), found[1].tokens.tolist()
    assert micro.input_ids.tolist() == [[*first, *second[3:]]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4]]
    assert micro.predictors.tolist() == [[0, 1, 2, 3], [0, 1, 2, 5]]
    sees = micro.attention_mask[0, 0].long()
    assert sees[4].tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert sees[6].tolist() == [1, 1, 1, 0, 0, 1, 1]


def test_advantages_of_the_environment_win_over_scores():
    group = make_group(
        [1, 0], completions=[2, 2], advantages=[[0, 0, 0, 3, 4]] * 2, overrides=[{}, {"set_advantage_to_zero": True}]
    )
    found = rows(group)
    micro = collate(found, [[0], [1]])
    table = token_advantages(found, micro, torch.tensor([1.0, 0.0]))
    assert table.tolist() == [[0, 0, 3, 4], [0, 0, 0, 0]]


def test_lengths_are_rounded_up_by_a_thirty_second_at_most_from_512_on():
    assert [rounded_length(n) for n in (1, 16, 17, 500, 512, 513, 1000, 1025, 8000)] == [
        16, 16, 32, 512, 512, 528, 1008, 1056, 8064
    ]  # fmt: skip
    assert all(n <= rounded_length(n) <= n * 33 / 32 + 1 for n in range(512, 9000))


def test_upstreams_padding_has_its_shapes_and_fill_values():
    data = {"batch": [make_group([1, 0, 0, 0], generation_params={"temperature": 0.8})]}
    tokens, labels, advantages, temperatures, logprobs = pad_data_to_good_offset(data, batch_size=2)
    assert [part.shape for part in tokens] == [(2, 64), (2, 64)]
    assert (labels[0][0] != -100).nonzero().flatten().tolist() == [2, 3, 4, 5]
    assert advantages[0].shape == (2, 1)
    torch.testing.assert_close(advantages[0][0], torch.tensor([1.7320508]))
    assert temperatures[0].flatten().tolist() == pytest.approx([0.8, 0.8])
    assert temperatures[0].shape == (2, 1, 1)
    assert logprobs[0][0, :7].tolist() == [1, 1, -2, -2, -2, -2, 1]


def test_upstreams_padding_accepts_a_null_for_inference_logprobs():
    data = {"batch": [make_group([1, 0]) | {"inference_logprobs": None}]}
    assert pad_data_to_good_offset(data, batch_size=2)[4] is None


def test_upstreams_padding_of_65_tokens_is_64_wide():
    data = {"batch": [make_group([1, 0], prompt=5, completions=[60, 1])]}
    assert pad_data_to_good_offset(data, batch_size=2)[0][0].shape == (2, 64)
