import errno
import json
from itertools import chain
from pathlib import Path

import pytest
from rollout_factory import CALL, PROMPT_IDS, TOOL, TOOLS, USER, chat_group, make_group, write_groups
from small_tokenizer import write_tokenizer
from transformers import AutoTokenizer

from atroposlib.data import output as output_module
from atroposlib.data.formats import _positions
from atroposlib.data.policy import SelectionPolicy, simple_policy
from atroposlib.data.report import dataset_card, write_meta
from atroposlib.data.sft import SftOptions, export_sft
from atroposlib.errors import AtroposError, ConfigError, DataError, PathError

ONE = make_group([1.0])


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]


def test_by_default_accepted_responses_become_prompts_and_completions(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0, 0.0, -0.5]), make_group([0.0, 2.0], item="1")])
    report = export_sft(rollouts, tmp_path / "o.jsonl")
    lines = lines_of(tmp_path / "o.jsonl")
    assert [(line["completion"][-1]["content"], line["score"]) for line in lines] == [
        ("<think>way 0</think> answer 0.0", 1.0),
        ("<think>way 1</think> answer 1.1", 2.0),
    ]
    assert (report.responses, report.kept, report.records) == (5, 2, 2)


def test_rewards_inside_messages_are_left_out(tmp_path):
    messages = [{"role": "user", "content": "q", "reward": 0.5}, {"role": "assistant", "content": "a", "reward": 1.0}]
    export_sft(write_groups(tmp_path / "a.jsonl", [make_group([1.0], messages=[messages])]), tmp_path / "o.jsonl")
    (line,) = lines_of(tmp_path / "o.jsonl")
    assert line["prompt"] + line["completion"] == [{k: m[k] for k in ("role", "content")} for m in messages]


def test_an_example_is_one_line_for_those_who_split_at_unicode_separators_too(tmp_path):
    group = make_group([1.0])
    group["messages"][0][1]["content"] = "one\u2028two\x85three"
    export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl")
    (line,) = lines_of(tmp_path / "o.jsonl")
    assert line["completion"][0]["content"] == "one\u2028two\x85three"


def test_sharegpt_uses_its_own_words(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0])])
    export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format="sharegpt"))
    (line,) = lines_of(tmp_path / "o.jsonl")
    assert line["conversations"][0] == {"from": "human", "value": "question 0"}
    assert line["conversations"][1]["from"] == "gpt"


FEW_SHOT = [USER, {"role": "assistant", "content": "rain"}, USER, {"role": "assistant", "content": "sun"}]
AGENT = [USER, CALL, TOOL, {"role": "assistant", "content": "12 degrees", "name": "ada", "extra": {"n": 10**30}}]
NULL = {"content": None}
ROWS = {
    "few-shot turns are prompt": (FEW_SHOT, "..x", {}, [(FEW_SHOT[:3], FEW_SHOT[3:])]),
    "a row for each turn": (AGENT, "..x.x", {}, [(AGENT[:1], [NULL | CALL]), ([USER, NULL | CALL, TOOL], AGENT[3:])]),
    "turns that follow each other are one": ([USER, CALL, AGENT[3]], ".x.x", {}, [([USER], [NULL | CALL, AGENT[3]])]),
    "what comes later is left out": ([USER, FEW_SHOT[1], USER], ".x", {}, [([USER], FEW_SHOT[1:2])]),
    "no ids: all turns": (FEW_SHOT, None, {}, [(FEW_SHOT[:1], FEW_SHOT[1:2]), (FEW_SHOT[:3], FEW_SHOT[3:])]),
}


@pytest.mark.parametrize(("chat", "mask", "extra", "expected"), ROWS.values(), ids=ROWS)
def test_a_completion_is_what_the_model_generated_with_every_key(tmp_path, chat, mask, extra, expected):
    group = json.dumps(chat_group([chat], [mask] if mask else None, **extra))
    (tmp_path / "a.jsonl").write_text(group + "\n")
    export_sft(tmp_path / "a.jsonl", tmp_path / "o.jsonl")
    assert [(line["prompt"], line["completion"]) for line in lines_of(tmp_path / "o.jsonl")] == expected


def test_weights_tell_the_generated_turns_and_a_row_may_end_with_each(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [chat_group([FEW_SHOT], ["..x"]), chat_group([FEW_SHOT], [".x..x"])])
    export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format="messages"))
    export_sft(rollouts, tmp_path / "t.jsonl", options=SftOptions(format="sharegpt", per_turn=True))
    weights = [[m.get("weight") for m in line["messages"]] for line in lines_of(tmp_path / "o.jsonl")]
    assert weights == [[None, 0, None, 1], [None, 1, None, 1]]
    weights = [[m.get("weight") for m in line["conversations"]] for line in lines_of(tmp_path / "t.jsonl")]
    assert weights == [[None, 0, None, 1], [None, 1], [None, 0, None, 1]]


def test_sharegpt_has_a_place_for_thoughts_calls_and_results(tmp_path):
    group = chat_group([[USER, CALL, TOOL, {"role": "assistant", "content": "12"}]], [".x.x"], tools=TOOLS)
    export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=SftOptions(format="sharegpt"))
    (line,) = lines_of(tmp_path / "o.jsonl")
    question, call, result, answer = line["conversations"]
    thought, _, calls = call["value"].rpartition("\n\n")
    assert (call["from"], thought) == ("function_call", "<think>\nI must look\n</think>")
    assert json.loads(calls) == [{"name": "weather", "arguments": {"city": "Bonn"}, "id": "c1", "type": "function"}]
    assert result == {"from": "observation", "value": "12 C", "tool_call_id": "c1"}
    assert (question["from"], answer["from"], json.loads(line["tools"])) == ("human", "gpt", TOOLS)


def test_results_of_several_calls_are_one_turn_of_sharegpt_as_its_loaders_take_no_two_in_a_row(tmp_path):
    calls = {"role": "assistant", "content": None, "tool_calls": CALL["tool_calls"] * 2}
    group = chat_group([[USER, calls, TOOL, TOOL | {"content": "rain"}, FEW_SHOT[3]]], [".x..x"])
    export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=SftOptions(format="sharegpt"))
    (line,) = lines_of(tmp_path / "o.jsonl")
    assert [turn["from"] for turn in line["conversations"]] == ["human", "function_call", "observation", "gpt"]
    assert line["conversations"][2]["value"] == "12 C\n</tool_response>\n<tool_response>\nrain"


IN_PARTS = [{"type": "text", "text": "wea"}, {"type": "input_text", "text": "ther?"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(("parts", "expected"), [(IN_PARTS, "weather?"), ([*IN_PARTS, IMAGE], [*IN_PARTS, IMAGE])])
def test_text_in_parts_is_text_as_the_model_was_given_it_unless_there_is_an_image(tmp_path, parts, expected):
    group = chat_group([[USER | {"content": parts}, FEW_SHOT[1], USER, FEW_SHOT[3]]] * 2, [".x.x"] * 2)
    rollouts = write_groups(tmp_path / "a.jsonl", [group])
    for format, key in (("messages", "messages"), ("prompt-completion", "prompt")):
        export_sft(rollouts, tmp_path / f"{format}.jsonl", options=SftOptions(format=format))
        assert lines_of(tmp_path / f"{format}.jsonl")[0][key][0] == USER | {"content": expected}


SET_ASIDE = {
    "text next to a call": ("sharegpt", [USER, CALL | {"content": "wait"}], ".x", "text next to a tool call"),
    "an image": ("sharegpt", [{"role": "user", "content": [{"type": "image"}]}, FEW_SHOT[1]], ".x", "parts that hold"),
    "no prompt": ("prompt-completion", FEW_SHOT[1:2], ".x", "an answer without a prompt"),
    "no answer": ("messages", [USER], ".x", "no turn of the assistant"),
    "a transcript": (
        "messages",
        [{"role": "user", "content": "<|im_start|>user\nhi"}],
        ".x",
        "no turn of the assistant",
    ),
    "a part of a turn": ("messages", [USER, FEW_SHOT[1]], ".x.x", "turns of which only a part is trained"),
    "unknown turns": ("messages", FEW_SHOT, ".x....", "turns of which only the tokenizer tells who wrote them"),
}


@pytest.mark.parametrize(("format", "chat", "mask", "reason"), SET_ASIDE.values(), ids=SET_ASIDE)
def test_a_row_that_a_format_cannot_hold_is_counted_by_reason(tmp_path, format, chat, mask, reason):
    rollouts = write_groups(tmp_path / "a.jsonl", [ONE, chat_group([chat], [mask], item_key="7")])
    report = export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format=format))
    assert report.records == 1
    assert [each["reason"].startswith(reason) for each in report.set_aside] == [True]


def test_the_tokenizer_tells_which_turns_were_generated(tmp_path, tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    chat = [*FEW_SHOT, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "edited by hand"}]
    pieces = [tokenizer.encode(f"{m['content']}<|im_end|>") for m in chat]
    masks = [[-100] * len(ids) if at != 3 else ids for at, ids in enumerate(pieces)]
    group = chat_group([chat]) | {"tokens": [[*chain(*pieces)]], "masks": [[*chain(*masks)]]}
    options = SftOptions(tokenizer=str(tokenizer_dir))
    export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=options)
    assert [line["completion"] for line in lines_of(tmp_path / "o.jsonl")] == [chat[3:4]]


def test_copies_of_an_earlier_row_are_counted(tmp_path):
    groups = [make_group([1.0, 1.0]), make_group([2.0, 0.5], item="1")]
    for group in groups:
        group["messages"] = [group["messages"][0]] * 2
    export = export_sft(write_groups(tmp_path / "a.jsonl", groups), tmp_path / "o.jsonl")
    assert (export.records, export.copies) == (4, 2)
    assert json.loads((tmp_path / "o.jsonl.meta.json").read_text())["copies"] == 2


def test_responses_cut_by_their_length_are_warned_of_where_a_template_would_end_them(tmp_path, caplog):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0, 1.0], finish_reasons=["length", "stop"])])
    export_sft(rollouts, tmp_path / "t.jsonl", options=SftOptions(format="tokens"))
    assert "cut by their length" not in caplog.text
    export_sft(rollouts, tmp_path / "o.jsonl")
    assert "cut by their length limit: 1" in caplog.text


def test_tokens_are_the_recorded_ids_and_labels_the_recorded_masks(tmp_path):
    group = make_group([1.0, 1.0])
    export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=SftOptions(format="tokens"))
    lines = lines_of(tmp_path / "o.jsonl")
    assert [line["input_ids"] for line in lines] == group["tokens"]
    assert [line["labels"] for line in lines] == group["masks"]
    assert [line["position_ids"] for line in lines] == [list(range(len(ids))) for ids in group["tokens"]]


ROWS = {
    "a prompt, then what was generated": ([1, 2, 5, 16], [-100, -100, 5, 16], ""),
    "no prompt": ([5], [5], ""),
    "what was generated stands in the prompt, too": ([5, 6, 5, 6], [-100, -100, 5, 6], ""),
    "a mask in the middle": ([1, 2, 3, 4], [-100, 2, -100, 4], ""),
    "ids whose text ends alike": ([1, 15, 6], [-100, 5, 6], "mask that does not fit the ids"),
    "a mask that is too short": ([1, 2, 5, 6], [-100, 5, 6], "mask that does not fit the ids"),
    "a fraction": ([1, 2.5], [-100, 2.5], "ids that are no numbers"),
    "below zero": ([-7, -100, 6], [-100, -100, 6], ""),
    "nothing generated": ([1, 2], [-100, -100], "nothing generated"),
}


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
@pytest.mark.parametrize(("ids", "mask", "reason"), ROWS.values(), ids=ROWS)
def test_rows_of_tokens_are_the_same_however_the_line_is_written(tmp_path, ids, mask, reason, separators):
    group = {"tokens": [[9, 8], ids], "masks": [[-100, 8], mask], "scores": [1.0, 1.0]}
    (tmp_path / "a.jsonl").write_text(json.dumps(group, separators=separators) + "\n")
    report = export_sft(tmp_path / "a.jsonl", tmp_path / "o.jsonl", options=SftOptions(format="tokens"))
    assert (tmp_path / "o.jsonl").read_text().count(" ") == 0
    sound = [([9, 8], [-100, 8]), (ids, mask)][: 1 if reason else 2]
    assert lines_of(tmp_path / "o.jsonl") == [
        {
            "input_ids": tokens,
            "attention_mask": [1] * len(tokens),
            "labels": labels,
            "position_ids": list(range(len(tokens))),
            "score": 1.0,
        }
        for tokens, labels in sound
    ]
    assert [each["reason"] for each in report.set_aside] == [reason] * bool(reason)


@pytest.mark.parametrize("count", [1, 10, 11, 100, 1024, 10_001])
def test_positions_are_cut_where_they_end(count):
    assert json.loads(_positions(count)) == list(range(count))


def test_masks_in_the_middle_survive(tmp_path):
    group = {"tokens": [[1, 2, 3, 4, 5]], "masks": [[-100, 2, -100, -100, 5]], "scores": [1.0]}
    export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=SftOptions(format="tokens"))
    assert lines_of(tmp_path / "o.jsonl")[0]["labels"] == [-100, 2, -100, -100, 5]


def test_prefix_is_cut_where_the_mask_starts_even_when_the_text_recurs(tmp_path, tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    prompt, said = tokenizer.encode("the answer"), tokenizer.encode(" is the answer")
    groups = [
        {"tokens": [prompt + said], "masks": [[-100] * len(prompt) + said], "scores": [1.0]},
        {"tokens": [said], "masks": [said], "scores": [1.0]},
    ]
    options = SftOptions(format="prefix", tokenizer=str(tokenizer_dir))
    export_sft(write_groups(tmp_path / "a.jsonl", groups), tmp_path / "o.jsonl", options=options)
    first, second = lines_of(tmp_path / "o.jsonl")
    assert (first["prefix"], first["completion"]) == ("the answer", " is the answer")
    assert (second["prefix"], second["completion"]) == ("", " is the answer")


TURNS = [
    {"role": "user", "content": "the sum of two"},
    {"role": "assistant", "content": "is four"},
    {"role": "user", "content": "and the answer"},
    {"role": "assistant", "content": "is three"},
]


def test_a_prefix_record_is_one_assistant_turn_and_all_before_it(tmp_path, tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    pieces = [tokenizer.encode(text) for text in ("the sum of two", " is four", " and the answer", " is three")]
    masks = [[-100] * len(piece) if at % 2 == 0 else piece for at, piece in enumerate(pieces)]
    group = {"tokens": [[*chain(*pieces)]], "masks": [[*chain(*masks)]], "scores": [1.0]}
    options = SftOptions(format="prefix", tokenizer=str(tokenizer_dir))
    report = export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=options)
    first, second = lines_of(tmp_path / "o.jsonl")
    assert (first["prefix"], first["completion"]) == ("the sum of two", " is four")
    assert (second["prefix"], second["completion"]) == ("the sum of two is four and the answer", " is three")
    assert (report.kept, report.records) == (1, 2)


def test_prefix_records_made_from_messages_are_cut_at_turns_too(tmp_path, tokenizer_dir):
    group = {"tokens": [], "masks": [], "scores": [1.0], "messages": [TURNS]}
    options = SftOptions(format="prefix", tokenizer=str(tokenizer_dir))
    export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=options)
    first, second = lines_of(tmp_path / "o.jsonl")
    assert [first["completion"], second["completion"]] == ["is four<|im_end|>", "is three<|im_end|>"]
    assert second["prefix"].startswith(first["prefix"] + first["completion"])
    assert "and the answer" in second["prefix"]


def test_missing_ids_are_made_from_messages_and_counted(tmp_path, tokenizer_dir, caplog):
    group = make_group([1.0], finish_reasons=["stop"]) | {"tokens": [], "masks": []}
    options = SftOptions(format="tokens", tokenizer=str(tokenizer_dir))
    report = export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=options)
    (line,) = lines_of(tmp_path / "o.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    trained = tokenizer.decode([label for label in line["labels"] if label != -100])
    assert trained == "<think>way 0</think> answer 0.0<|im_end|>"
    assert report.rerendered == 1
    assert "re-rendering" in caplog.text


def test_recorded_ids_are_never_tokenised_again(tmp_path, tokenizer_dir, monkeypatch):
    monkeypatch.setattr("atroposlib.data.sft.TemplateRenderer", None)
    group = make_group([1.0]) | {"messages": None}
    options = SftOptions(format="tokens", tokenizer=str(tokenizer_dir))
    assert export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=options).records == 1


def test_packed_rows_hold_whole_sequences_with_their_own_positions(tmp_path):
    group = make_group([1.0, 1.0, 1.0])
    report = export_sft(
        write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=SftOptions(format="tokens", pack=14)
    )
    lines = lines_of(tmp_path / "o.jsonl")
    assert report.records == 2
    assert [line["position_ids"] for line in lines] == [[*range(8), *range(6)], [*range(7)]]
    assert sum(len(line["input_ids"]) for line in lines) == sum(len(ids) for ids in group["tokens"])


def test_a_sequence_longer_than_a_packed_row_is_refused(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0])])
    with pytest.raises(DataError, match="has 6 tokens, but --pack is 5"):
        export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format="tokens", pack=5))
    assert not (tmp_path / "o.jsonl").exists()
    assert leftovers(tmp_path) == []


BAD_CONTENT = {
    "messages null": (ONE | {"messages": None}, {}, "use --format prefix or tokens"),
    "message is text": (ONE | {"messages": ["text"]}, {}, "a transcript instead of messages"),
    "one conversation null": (ONE | {"messages": [None]}, {}, "no messages were recorded"),
    "no survivors": (ONE | {"scores": [0.0]}, {}, "no response survived of 1 in 1 groups"),
    "score null": (ONE | {"scores": [None]}, {}, "no score: 1"),
    "score beyond floats": ({**ONE, "scores": [10**400]}, {}, "scores"),
    "mask of another length": (ONE | {"masks": [[-100, 2]]}, {"format": "tokens"}, "6 tokens but 2 mask values"),
    "mask of ones": (ONE | {"masks": [[0, 0, 0, 0, 1, 1]]}, {"format": "tokens"}, "masks[0] is 0 where tokens[0] is 1"),
    "all masked": (ONE | {"masks": [[-100] * 6]}, {"format": "tokens"}, "nothing generated: 1"),
    "ids not numbers": (ONE | {"tokens": [["a"] * 6]}, {"format": "tokens"}, "not a list of whole numbers"),
    "no ids and no tokenizer": (ONE | {"tokens": [], "masks": []}, {"format": "tokens"}, "give --tokenizer"),
}


@pytest.mark.parametrize(("group", "options", "reason"), BAD_CONTENT.values(), ids=BAD_CONTENT)
def test_bad_content_is_one_sentence_and_leaves_no_output(tmp_path, group, options, reason):
    rollouts = tmp_path / "a.jsonl"
    rollouts.write_text(json.dumps(ONE | {"scores": [0.0]}) + "\n" + json.dumps(group) + "\n")
    if reason.startswith("no response"):
        rollouts.write_text(json.dumps(group) + "\n")
    with pytest.raises(AtroposError) as caught:
        export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(**options))
    assert reason in str(caught.value)
    assert f"{rollouts}:2" in str(caught.value) or reason.startswith("no response")
    assert {path.name for path in tmp_path.iterdir()} <= {"a.jsonl", ".a.jsonl.idx"}


def test_ids_outside_the_vocabulary_are_named(tmp_path, tokenizer_dir):
    group = {"tokens": [[1, 99_999]], "masks": [[-100, 99_999]], "scores": [1.0]}
    options = SftOptions(format="tokens", tokenizer=str(tokenizer_dir))
    with pytest.raises(DataError, match=r"a\.jsonl:1\[0\]: token id 99999 is outside the tokenizer's \d+ ids"):
        export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=options)


def test_a_tokenizer_that_does_not_match_the_ids_is_noticed(tmp_path, tokenizer_dir):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0, 1.0])])  # ids that say nothing like the messages
    with pytest.raises(DataError, match="is not the tokenizer of the model"):
        export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format="prefix", tokenizer=str(tokenizer_dir)))


def test_a_matching_tokenizer_passes_the_check(tmp_path, tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "the answer"}]
    ids, said = [*tokenizer.encode("q")], tokenizer.encode("the answer")
    group = {"tokens": [ids + said], "masks": [[-100] * len(ids) + said], "scores": [1.0], "messages": [chat]}
    options = SftOptions(format="prefix", tokenizer=str(tokenizer_dir))
    assert export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=options).records == 1


def test_an_existing_output_is_refused_appended_to_or_replaced(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [ONE])
    target = tmp_path / "o.jsonl"
    export_sft(rollouts, target)
    with pytest.raises(PathError, match="exists; use --append-to-previous, --overwrite"):
        export_sft(rollouts, target)
    export_sft(rollouts, target, options=SftOptions(append=True))
    assert len(lines_of(target)) == 2
    export_sft(rollouts, target, options=SftOptions(overwrite=True))
    assert len(lines_of(target)) == 1


def test_what_is_appended_has_the_format_of_what_is_there_and_the_card_counts_both(tmp_path, caplog):
    target = tmp_path / "o.jsonl"
    for item in "01":
        rollouts = write_groups(tmp_path / f"{item}.jsonl", [make_group([1.0, 1.0], item=item)])
        export_sft(rollouts, target, options=SftOptions(append=True))
        with pytest.raises(
            PathError, match="of atropos sft --format prompt-completion, found atropos sft --format tokens"
        ):
            export_sft(rollouts, target, options=SftOptions(format="tokens", append=True))
    assert len(lines_of(target)) == 4
    card = dataset_card(target)
    assert "4 records in format `prompt-completion`, made from 4 of 4 scored responses in 2 groups" in card
    assert all(f"{item}.jsonl |" in card for item in "01")
    assert "twice" not in caplog.text
    export_sft(tmp_path / "0.jsonl", target, options=SftOptions(append=True))
    assert "holds records of these rollouts already" in caplog.text


def test_the_record_of_an_export_that_was_killed_before_its_rename_is_no_part_of_the_next(tmp_path, monkeypatch):
    first, second = (write_groups(tmp_path / f"{item}.jsonl", [make_group([1.0], item=item)]) for item in "01")
    export_sft(first, tmp_path / "o.jsonl")

    def killed(*of):
        write_meta(*of)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("atroposlib.data.report.write_meta", killed)
        with pytest.raises(KeyboardInterrupt):
            export_sft(second, tmp_path / "o.jsonl", options=SftOptions(append=True))
    assert "1 records in format" in dataset_card(tmp_path / "o.jsonl")
    report = export_sft(second, tmp_path / "o.jsonl", options=SftOptions(append=True))
    assert [Path(each["inputs"][0]["path"]).name for each in report.earlier] == ["0.jsonl"]


def test_a_full_disk_leaves_the_previous_output_whole(tmp_path, monkeypatch):
    rollouts = write_groups(tmp_path / "a.jsonl", [ONE])
    export_sft(rollouts, tmp_path / "o.jsonl")
    before = (tmp_path / "o.jsonl").read_bytes()

    def no_space(self, record):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output_module.JsonlWriter, "write", no_space)
    with pytest.raises(PathError, match="No space left on device; nothing was changed"):
        export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(append=True))
    assert (tmp_path / "o.jsonl").read_bytes() == before
    assert leftovers(tmp_path) == []


def test_output_paths_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("SETS", str(tmp_path / "sets"))
    rollouts = write_groups(tmp_path / "a.jsonl", [ONE])
    export_sft(rollouts, "${SETS}/o.jsonl")
    assert (tmp_path / "sets" / "o.jsonl").exists()


def test_options_that_do_not_fit_are_refused(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [ONE])
    with pytest.raises(ConfigError, match="--pack needs --format tokens"):
        export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(pack=10))
    with pytest.raises(ConfigError, match="give --tokenizer"):
        export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format="prefix"))


def test_the_recipe_is_recorded_beside_the_output(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0, 0.0], task="sums")])
    export_sft(rollouts, tmp_path / "o.jsonl", simple_policy(top_n=1))
    meta = json.loads((tmp_path / "o.jsonl.meta.json").read_text())
    assert [step["step"] for step in meta["policy"]["steps"]] == ["score", "top_n"]
    assert meta["inputs"][0]["path"] == str(rollouts)
    assert meta["tasks"] == {"sums": 1}


def test_what_an_evaluation_set_shares_is_listed_beside_the_output(tmp_path):
    (tmp_path / "eval.txt").write_text("way 0 think answer 0 0 and nothing else here\n")
    groups = [make_group([1.0, 1.0])]
    groups[0]["messages"][0][1]["content"] = "Way 0: think, answer 0.0 and nothing else here"
    policy = SelectionPolicy.model_validate(
        {"steps": [{"step": "decontaminate", "against": [str(tmp_path / "eval.txt")]}]}
    )
    export_sft(write_groups(tmp_path / "a.jsonl", groups), tmp_path / "o.jsonl", policy)
    (hit,) = lines_of(tmp_path / "o.jsonl.contamination.jsonl")
    assert hit["where"].endswith("a.jsonl:1[0]")
    assert json.loads((tmp_path / "o.jsonl.meta.json").read_text())["contaminated"] == 1
    export_sft(tmp_path / "a.jsonl", tmp_path / "o.jsonl", options=SftOptions(overwrite=True))
    assert not (tmp_path / "o.jsonl.contamination.jsonl").exists()


def test_a_tokenizer_without_template_cannot_make_ids(tmp_path):
    folder = write_tokenizer(tmp_path / "t", None)
    group = ONE | {"tokens": [], "masks": []}
    with pytest.raises(DataError, match="no chat template"):
        export_sft(
            write_groups(tmp_path / "a.jsonl", [group]),
            tmp_path / "o.jsonl",
            options=SftOptions(format="tokens", tokenizer=str(folder)),
        )


def test_upstream_lines_give_the_same_records(tmp_path):
    upstream = {key: make_group([1.0])[key] for key in ("tokens", "masks", "scores", "messages")}
    export_sft(
        write_groups(tmp_path / "a.jsonl", [upstream]), tmp_path / "o.jsonl", options=SftOptions(format="tokens")
    )
    assert lines_of(tmp_path / "o.jsonl")[0]["input_ids"][: len(PROMPT_IDS)] == PROMPT_IDS
