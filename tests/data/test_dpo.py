import json

import pytest
from rollout_factory import TOOLS, USER, chat_group, make_group, write_groups
from transformers import AutoTokenizer

from atroposlib.data.dpo import DpoOptions, PairRules, export_dpo, preference_pairs
from atroposlib.data.sft import SftOptions, export_sft
from atroposlib.errors import ConfigError, DataError, PathError


def pairs(scores, lengths=None, **rules):
    return preference_pairs(scores, lengths or [10] * len(scores), list(range(len(scores))), PairRules(**rules))


PAIRS = {
    "best against worst, then inwards": ({"scores": [0.2, 1.0, -1.0, 0.9], "min_gap": 0.1}, [(1, 2), (3, 0)]),
    "equal scores give none": ({"scores": [1.0, 1.0, 1.0]}, []),
    "the gap must be exceeded": ({"scores": [1.0, 0.5], "min_gap": 0.5}, []),
    "the better must be right": ({"scores": [-0.1, -1.0], "min_gap": 0.1}, []),
    "unless any will do": ({"scores": [-0.1, -1.0], "min_gap": 0.1, "above": None}, [(0, 1)]),
    "at most k": ({"scores": [1.0, 1.0, 0.0, 0.0], "max_pairs": 1}, [(0, 2)]),
    "hard negatives are alike in length": (
        {"scores": [1.0, 0.0, -1.0], "lengths": [100, 90, 500], "negatives": "near_length"},
        [(0, 1)],
    ),
    "length ratio": ({"scores": [1.0, 0.0, -1.0], "lengths": [100, 140, 500], "max_length_ratio": 1.5}, [(0, 1)]),
    "none within the ratio": ({"scores": [1.0, -1.0], "lengths": [100, 500], "max_length_ratio": 1.5}, []),
    "one response alone": ({"scores": [1.0]}, []),
}


@pytest.mark.parametrize(("case", "expected"), PAIRS.values(), ids=PAIRS)
def test_pairs(case, expected):
    assert pairs(**case) == expected


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_default_is_what_trl_loads(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([0.0, 1.0]), make_group([1.0, 1.0], item="1")])
    report = export_dpo(rollouts, tmp_path / "o.jsonl")
    (line,) = lines_of(tmp_path / "o.jsonl")
    assert line["prompt"] == [{"role": "user", "content": "question 0"}]
    assert line["chosen"][0]["content"] == "<think>way 1</think> answer 0.1"
    assert line["rejected"][0]["content"] == "<think>way 0</think> answer 0.0"
    assert (line["score_chosen"], line["score_rejected"], report.records) == (1.0, 0.0, 1)


def test_upstream_formats_keep_their_keys(tmp_path, tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    prompt, good, bad = (tokenizer.encode(text) for text in ("the question", " five", " two"))
    group = make_group([1.0, 0.0]) | {
        "tokens": [prompt + good, prompt + bad],
        "masks": [[-100] * len(prompt) + good, [-100] * len(prompt) + bad],
    }
    rollouts = write_groups(tmp_path / "a.jsonl", [group])
    export_dpo(rollouts, tmp_path / "m.jsonl", options=DpoOptions(format="messages"))
    assert set(lines_of(tmp_path / "m.jsonl")[0]) == {"pos", "score", "neg"}
    export_dpo(rollouts, tmp_path / "p.jsonl", options=DpoOptions(format="prefix", tokenizer=str(tokenizer_dir)))
    assert lines_of(tmp_path / "p.jsonl") == [{"prefix": "the question", "pos": " five", "score": 1.0, "neg": " two"}]
    export_dpo(rollouts, tmp_path / "t.jsonl", options=DpoOptions(format="tokens"))
    assert lines_of(tmp_path / "t.jsonl")[0]["rejected_input_ids"] == bad


def test_a_problem_gives_at_most_k_pairs_over_all_its_groups(tmp_path):
    groups = [make_group([1.0, 0.0, 1.0, 0.0]), make_group([1.0, 0.0])]
    report = export_dpo(write_groups(tmp_path / "a.jsonl", groups), tmp_path / "o.jsonl", PairRules(max_pairs=2))
    assert report.records == 2


def test_responses_to_different_prompts_never_pair(tmp_path, caplog):
    group = make_group([1.0, 0.0])
    group["tokens"][1][0] = 99
    other = make_group([1.0, 0.0], item="1")
    report = export_dpo(write_groups(tmp_path / "a.jsonl", [group, other]), tmp_path / "o.jsonl")
    assert report.records == 1
    assert "prompts differ: 1" in caplog.text


def test_no_pair_at_all_is_said_and_nothing_is_written(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0, 1.0])])
    with pytest.raises(DataError, match=r"no pair in 1 groups.* more than 0\.5, with the better above 0\.0; lower"):
        export_dpo(rollouts, tmp_path / "o.jsonl")
    with pytest.raises(DataError, match=r"no pair in 1 groups.* more than 0\.5; lower"):
        export_dpo(rollouts, tmp_path / "o.jsonl", rules=PairRules(above=None))
    assert {path.name for path in tmp_path.iterdir()} <= {"a.jsonl", ".a.jsonl.idx"}


def test_prefix_needs_a_tokenizer(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0, 0.0])])
    with pytest.raises(ConfigError, match="give --tokenizer"):
        export_dpo(rollouts, tmp_path / "o.jsonl", options=DpoOptions(format="prefix"))


def said(text):
    return {"role": "assistant", "content": text}


SHOTS = [USER, said("rain"), USER]


def test_few_shot_turns_are_the_prompt_of_a_pair(tmp_path):
    group = chat_group([[*SHOTS, said("sun")], [*SHOTS, said("snow")]], ["...x"] * 2, tools=TOOLS)
    export_dpo(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl")
    (line,) = lines_of(tmp_path / "o.jsonl")
    assert (line["prompt"], line["chosen"], line["rejected"]) == (SHOTS, [said("sun")], [said("snow")])
    assert json.loads(line["tools"]) == TOOLS


def test_pairs_of_several_turns_are_set_aside_but_as_tokens_with_labels(tmp_path):
    chats = [[USER, said("sun"), USER, said("yes")], [USER, said("snow"), USER, said("no")]]
    groups = [chat_group(chats, [".x.x", ".xx.x"]), make_group([1.0, 0.0], item="1")]
    rollouts = write_groups(tmp_path / "a.jsonl", groups)
    report = export_dpo(rollouts, tmp_path / "o.jsonl")
    assert (report.records, [(each["reason"], each["count"]) for each in report.set_aside]) == (
        1,
        [("several generated turns", 1)],
    )
    export_dpo(rollouts, tmp_path / "t.jsonl", options=DpoOptions(format="tokens"))
    line = lines_of(tmp_path / "t.jsonl")[0]
    assert (line["chosen_labels"], line["rejected_labels"]) == ([11, -100, 13], [11, 12, -100, 14])


def test_what_follows_the_generated_turn_is_no_part_of_a_pair(tmp_path):
    chats = [[USER, said("sun"), USER], [USER, said("snow"), USER]]
    export_dpo(write_groups(tmp_path / "a.jsonl", [chat_group(chats, [".x.", ".x."])]), tmp_path / "o.jsonl")
    (line,) = lines_of(tmp_path / "o.jsonl")
    assert (line["prompt"], line["chosen"], line["rejected"]) == ([USER], [said("sun")], [said("snow")])


def test_copies_of_pairs_are_counted(tmp_path):
    chats = [[USER, said(text)] for text in ("sun", "snow", "sun", "snow")]
    group = chat_group(chats, [".x"] * 4) | {"scores": [1.0, 0.0, 1.0, 0.0]}
    report = export_dpo(write_groups(tmp_path / "a.jsonl", [group]), tmp_path / "o.jsonl")
    assert (report.records, report.copies) == (2, 1)


def test_an_image_in_one_answer_alone_makes_no_other_prompt_of_it(tmp_path):
    parts = [{"type": "text", "text": "weather?"}]
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    chats = [
        [USER | {"content": parts}, answer, USER | {"content": later}, answer]
        for answer, later in (
            ({"role": "assistant", "content": "a"}, parts),
            ({"role": "assistant", "content": "b"}, [image]),
        )
    ]
    rollouts = write_groups(tmp_path / "a.jsonl", [chat_group(chats, [".x.x"] * 2)])
    export_dpo(rollouts, tmp_path / "o.jsonl", options=DpoOptions(format="messages"))
    pair = json.loads((tmp_path / "o.jsonl").read_text())
    assert (pair["pos"], pair["neg"]) == tuple(chats)


@pytest.mark.parametrize("format", ["messages", "tokens"])
def test_pairs_are_not_appended_to_responses_whose_format_has_the_same_name(tmp_path, format):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0, 0.0])])
    export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format=format))
    with pytest.raises(PathError, match=f"of atropos sft --format {format}, found atropos dpo --format {format}"):
        export_dpo(rollouts, tmp_path / "o.jsonl", options=DpoOptions(format=format, append=True))
    export_dpo(rollouts, tmp_path / "p.jsonl", options=DpoOptions(format=format))
    export_dpo(rollouts, tmp_path / "p.jsonl", options=DpoOptions(format=format, append=True))
    with pytest.raises(PathError, match=f"of atropos dpo --format {format}, found atropos sft --format {format}"):
        export_sft(rollouts, tmp_path / "p.jsonl", options=SftOptions(format=format, append=True))
