import errno
import json
from itertools import chain

import pytest
from rollout_factory import PROMPT_IDS, make_group, write_groups
from small_tokenizer import write_tokenizer
from transformers import AutoTokenizer

from atroposlib.data import output as output_module
from atroposlib.data.conversion import SftOptions
from atroposlib.data.policy import Policy, simple_policy
from atroposlib.data.sft import export_sft
from atroposlib.errors import AtroposError, ConfigError, DataError, PathError


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]


def test_by_default_accepted_responses_become_chat_messages(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0, 0.0, -0.5]), make_group([0.0, 2.0], item="1")])
    report = export_sft(rollouts, tmp_path / "o.jsonl")
    lines = lines_of(tmp_path / "o.jsonl")
    assert [(line["messages"][-1]["content"], line["score"]) for line in lines] == [
        ("<think>way 0</think> answer 0.0", 1.0),
        ("<think>way 1</think> answer 1.1", 2.0),
    ]
    assert (report.responses, report.kept, report.records) == (5, 2, 2)


def test_rewards_inside_messages_are_left_out(tmp_path):
    group = make_group([1.0]) | {"messages": [[{"role": "user", "content": "q", "reward": 0.5}]]}
    export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl")
    assert lines_of(tmp_path / "o.jsonl")[0]["messages"] == [{"role": "user", "content": "q"}]


def test_an_example_is_one_line_for_those_who_split_at_unicode_separators_too(tmp_path):
    group = make_group([1.0]) | {"messages": [[{"role": "assistant", "content": "one\u2028two\x85three"}]]}
    export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl")
    (line,) = lines_of(tmp_path / "o.jsonl")
    assert line["messages"][0]["content"] == "one\u2028two\x85three"


def test_sharegpt_uses_its_own_words(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0])])
    export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format="sharegpt"))
    (line,) = lines_of(tmp_path / "o.jsonl")
    assert line["conversations"][0] == {"from": "human", "value": "question 0"}
    assert line["conversations"][1]["from"] == "gpt"


def test_tokens_are_the_recorded_ids_and_labels_the_recorded_masks(tmp_path):
    group = make_group([1.0, 1.0])
    export_sft(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl", options=SftOptions(format="tokens"))
    lines = lines_of(tmp_path / "o.jsonl")
    assert [line["input_ids"] for line in lines] == group["tokens"]
    assert [line["labels"] for line in lines] == group["masks"]
    assert [line["position_ids"] for line in lines] == [list(range(len(ids))) for ids in group["tokens"]]


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
    monkeypatch.setattr("atroposlib.data.conversion.Rerenderer", None)
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


ONE = make_group([1.0])
BAD_CONTENT = {
    "messages null": (ONE | {"messages": None}, {}, "'messages' were not recorded"),
    "message is text": (ONE | {"messages": ["text"]}, {}, "is not a list of"),
    "one conversation null": (ONE | {"messages": [None]}, {}, "is not a list of"),
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
    policy = Policy.model_validate({"steps": [{"step": "decontaminate", "against": [str(tmp_path / "eval.txt")]}]})
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
