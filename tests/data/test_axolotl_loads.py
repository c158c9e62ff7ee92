"""What axolotl loads, loaded by its own `prepare_datasets` and collator; skipped where it is missing.

It need not run on a GPU: the package with what its loader imports is enough.
"""

import pytest
from rollout_factory import make_group, write_groups

from atroposlib.data.sft import SftOptions, export_sft

pytestmark = pytest.mark.filterwarnings("default")  # third-party packages warn about each other

CHAT = {"type": "chat_template"}
SHAREGPT = {
    **CHAT,
    "field_messages": "conversations",
    "message_property_mappings": {"role": "from", "content": "value"},
}
TOKENIZED = {"type": "completion"}  # not looked at where ids, attention mask and labels are there


@pytest.fixture
def prepare(tmp_path, tokenizer_dir, monkeypatch):
    """Gives axolotl's rows of the first two rollouts' accepted responses, written in some format."""
    sft = pytest.importorskip("axolotl.utils.data.sft", exc_type=ImportError)
    transformers = pytest.importorskip("transformers")
    from axolotl.utils.dict import DictDefault  # type: ignore[import-not-found]

    monkeypatch.chdir(tmp_path)
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0, 0.0, 1.0], item=str(i)) for i in range(2)])

    def prepared(options, dataset):
        export_sft(rollouts, tmp_path / "o.jsonl", options=options)
        config = {
            "datasets": [DictDefault({"path": str(tmp_path / "o.jsonl"), "ds_type": "json", **dataset})],
            "dataset_prepared_path": str(tmp_path / "prepared"),
            "sequence_len": 128,
            "val_set_size": 0,
            "seed": 1,
            "num_epochs": 1,
            "dataset_num_proc": 1,
            "batch_size": 1,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "world_size": 1,
        }
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
        rows, *_ = sft.prepare_datasets(DictDefault(config), tokenizer)
        return rows, tokenizer

    return prepared


@pytest.mark.parametrize(("format", "dataset"), [("messages", CHAT), ("sharegpt", SHAREGPT)])
def test_chats_are_trained_on_what_the_assistant_said(prepare, format, dataset):
    rows, tokenizer = prepare(SftOptions(format=format), dataset)
    trained = [tokenizer.decode([label for label in row["labels"] if label != -100]) for row in rows]
    expected = [f"<think>way {j}</think> answer {i}.{j}<|im_end|>" for j in (0, 2) for i in range(2)]
    assert sorted(trained) == expected


@pytest.mark.parametrize("pack", [None, 16])
def test_token_rows_reach_the_collator_unchanged(prepare, pack, tmp_path):
    rows, tokenizer = prepare(SftOptions(format="tokens", pack=pack), TOKENIZED)
    collators = pytest.importorskip("axolotl.utils.collators.batching", exc_type=ImportError)
    columns = ("input_ids", "attention_mask", "labels", "position_ids")
    batch = collators.DataCollatorForSeq2Seq(tokenizer)([{key: row[key] for key in columns} for row in rows])
    assert set(batch) == set(columns)
    expected = sorted(label for row in rows for label in row["labels"] if label != -100)
    assert sorted(batch["labels"][batch["labels"] != -100].tolist()) == expected
    recorded = [make_group([1.0, 0.0, 1.0], item=str(i))["masks"][j] for i in range(2) for j in (0, 2)]
    assert expected == sorted(label for mask in recorded for label in mask if label != -100)
