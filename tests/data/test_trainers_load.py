"""What trainers load, loaded: runs where `datasets`, `trl` and `torch` are installed, is skipped elsewhere."""

import numpy as np
import pytest
from rollout_factory import make_group, write_groups
from trainer_loads import CHATS, count, count_pairs
from transformers import AutoTokenizer

from atroposlib.data.dpo import DpoOptions, export_dpo
from atroposlib.data.sft import SftOptions, export_sft

COLUMNS = {
    "prompt-completion": {"prompt", "completion", "score"},
    "messages": {"messages", "score"},
    "sharegpt": {"conversations", "score"},
    "tokens": {"input_ids", "attention_mask", "labels", "position_ids", "score"},
}

pytestmark = pytest.mark.filterwarnings("default")  # third-party packages warn about each other


@pytest.fixture
def rollouts(tmp_path):
    return write_groups(tmp_path / "a.jsonl", [make_group([1.0, 0.0, 1.0], item=str(i)) for i in range(3)])


def load(path, tmp_path):
    datasets = pytest.importorskip("datasets")
    kind = "parquet" if path.suffix == ".parquet" else "json"
    return datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("format", COLUMNS)
def test_datasets_loads_every_format(rollouts, tmp_path, format, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    export_sft(rollouts, tmp_path / f"o{suffix}", options=SftOptions(format=format))
    loaded = load(tmp_path / f"o{suffix}", tmp_path)
    assert set(loaded.column_names) == COLUMNS[format]
    assert len(loaded) == 6


def test_packed_rows_load_with_their_positions(rollouts, tmp_path):
    export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format="tokens", pack=16))
    loaded = load(tmp_path / "o.jsonl", tmp_path)
    assert set(loaded.column_names) == {"input_ids", "attention_mask", "labels", "position_ids"}
    assert all(row["position_ids"].count(0) >= 1 for row in loaded)


def test_the_seq2seq_collator_pads_labels_where_no_loss_is(rollouts, tmp_path, tokenizer_dir):
    transformers = pytest.importorskip("transformers")
    export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format="tokens"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    collate = transformers.DataCollatorForSeq2Seq(tokenizer, return_tensors="np")
    rows = load(tmp_path / "o.jsonl", tmp_path).select_columns(["input_ids", "attention_mask", "labels"])
    batch = collate([rows[0], rows[1]])  # this collator pads no other column
    labels = np.asarray(batch["labels"])
    ids = np.asarray(batch["input_ids"])
    assert labels.shape == ids.shape
    assert ((labels == -100) | (labels == ids)).all()
    assert (labels != -100).sum() == sum(label != -100 for row in (rows[0], rows[1]) for label in row["labels"])


def test_trl_collates_tokens_and_packed_rows(rollouts, tmp_path):
    pytest.importorskip("torch")
    trainer = pytest.importorskip("trl.trainer.sft_trainer")
    collate = trainer.DataCollatorForLanguageModeling(pad_token_id=0)
    export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format="tokens"))
    rows = load(tmp_path / "o.jsonl", tmp_path)
    batch = collate([rows[0], rows[1]])
    expected = [label for row in (rows[0], rows[1]) for label in row["labels"] if label != -100]
    assert batch["labels"][batch["labels"] != -100].tolist() == expected


def test_a_flattening_collator_takes_token_rows(rollouts, tmp_path):
    transformers = pytest.importorskip("transformers")
    collate = transformers.DataCollatorWithFlattening(return_tensors="np")
    export_sft(rollouts, tmp_path / "o.jsonl", options=SftOptions(format="tokens"))
    rows = load(tmp_path / "o.jsonl", tmp_path)
    batch = collate([rows[0], rows[1]])
    assert np.asarray(batch["position_ids"]).tolist() == [[*rows[0]["position_ids"], *rows[1]["position_ids"]]]


def test_trl_knows_chats_and_pairs_as_conversational(rollouts, tmp_path):
    trl = pytest.importorskip("trl")
    export_sft(rollouts, tmp_path / "s.jsonl", options=SftOptions(format="prompt-completion"))
    export_dpo(rollouts, tmp_path / "d.jsonl", options=DpoOptions(format="trl"))
    assert trl.is_conversational(load(tmp_path / "s.jsonl", tmp_path)[0])
    assert trl.is_conversational(load(tmp_path / "d.jsonl", tmp_path)[0])


def test_trl_renders_pairs_with_a_template(rollouts, tmp_path, tokenizer_dir):
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    export_dpo(rollouts, tmp_path / "d.jsonl")
    row = {key: load(tmp_path / "d.jsonl", tmp_path)[0][key] for key in ("prompt", "chosen", "rejected")}
    rendered = trl.apply_chat_template(row, transformers.AutoTokenizer.from_pretrained(tokenizer_dir))
    assert rendered["prompt"].endswith("<|im_start|>assistant\n")
    assert rendered["chosen"].startswith("<think>")


EXACT = {
    "trl": ["`prompt-completion` in TRL `SFTTrainer`", "`tokens` in TRL `SFTTrainer`"],
    "llamafactory": ["`sharegpt --per-turn` in LLaMA-Factory, `mask_history`"],
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize(("package", "load"), [(package, load) for package in EXACT for load in EXACT[package]])
def test_a_trainer_takes_loss_on_what_was_generated_and_the_line_break_of_its_template(tmp_path, package, load, name):
    pytest.importorskip(package)
    trained, generated, more = count(load, name, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert trained - more.total() == generated
    assert tokenizer.decode([*more.elements()]).strip("\n") == ""


def test_trl_takes_loss_on_both_sides_of_a_pair_and_no_few_shot_turn(tmp_path):
    pytest.importorskip("trl")
    trained, generated, more = count_pairs("few-shot", tmp_path)
    assert trained - more.total() == generated
    assert more.total() == 2
