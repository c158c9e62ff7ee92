"""Counts what trainers take loss on in each of our formats: `python tests/data/trainer_loads.py`.

Five rollouts (one turn, few-shot, several turns, tools, reasoning) are recorded with ids and masks, exported, and
loaded by the trainers' own code, which need not run on a GPU. A cell is `trained / recorded` tokens; the ones in
brackets were trained although they were not generated. What cannot be loaded says why.
"""

import importlib
import json
import logging
import os
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollout_factory import CALL, TOOL, TOOLS, USER, write_groups
from small_tokenizer import write_tokenizer
from transformers import AutoTokenizer

from atroposlib.data.dpo import DpoOptions, export_dpo
from atroposlib.data.report import NothingKept
from atroposlib.data.sft import SftOptions, export_sft
from atroposlib.data.templates import TemplateRenderer

CHATML = (  # with tools, thoughts and calls, as Qwen 3 writes them
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    '{% if m.tool_calls %}{% for c in m.tool_calls %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}\n</tool_call>"
    "{% endfor %}{% endif %}{% else %}{{ m.content or '' }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def said(text: str, **keys: Any) -> dict[str, Any]:
    """One message of the assistant."""
    return {"role": "assistant", "content": text, **keys}


CHATS: dict[str, tuple[list[dict[str, Any]], list[int], dict[str, Any]]] = {  # messages, generated turns, group keys
    "one turn": ([USER, said("sun, 12 degrees")], [1], {}),
    "few-shot": ([USER, said("rain"), USER, said("snow"), USER, said("sun, 12 degrees")], [5], {}),
    "several turns": ([USER, said("sun"), USER, said("still sun")], [1, 3], {}),
    "tools": (
        [USER, {**CALL, "reasoning_content": "", "content": ""}, TOOL, said("12 degrees")],
        [1, 3],
        {"tools": TOOLS},
    ),
    "reasoning": ([USER, said("sun", reasoning_content="I look out of the window")], [1], {}),
}
Rows = Iterable[tuple[list[int], list[int]]]
Loader = Callable[[Path, Path], Rows]


def recorded(name: str, tokenizer: Any) -> tuple[dict[str, Any], list[int]]:
    """A group of one rollout, and the ids that it trains."""
    messages, generated, extra = CHATS[name]
    renderer = TemplateRenderer(tokenizer)
    segments = renderer.segments(messages, generated=generated, tools=extra.get("tools"))
    ((ids, labels),) = renderer.encode([segments])
    group = {"tokens": [ids], "masks": [labels], "scores": [1.0], "messages": [messages], "item_key": "0", **extra}
    return group, [label for label in labels if label != -100]


def trl_sft(path: Path, tokenizer: Path) -> Rows:
    """TRL's SFTTrainer with its defaults: what it prepares, through its collator."""
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    config = SFTConfig(output_dir=str(path.parent / "trl"), report_to="none", use_cpu=True, bf16=False, max_length=None)
    trainer = SFTTrainer(
        model=_tiny_model(), args=config, train_dataset=_dataset(path), processing_class=_tokenizer(tokenizer)
    )
    for row in trainer.train_dataset:
        batch = trainer.data_collator([row])
        yield batch["input_ids"][0].tolist(), batch["labels"][0].tolist()


def trl_dpo(path: Path, tokenizer: Path) -> Rows:
    """TRL's DPOTrainer; of each pair both sides."""
    from trl import DPOConfig, DPOTrainer  # type: ignore[import-not-found]

    config = DPOConfig(output_dir=str(path.parent / "trl"), report_to="none", use_cpu=True, bf16=False, max_length=None)
    trainer = DPOTrainer(
        model=_tiny_model(),
        ref_model=_tiny_model(),
        args=config,
        train_dataset=_dataset(path),
        processing_class=_tokenizer(tokenizer),
    )
    for row in trainer.train_dataset:
        batch = trainer.data_collator([row])
        for ids, mask in zip(batch["input_ids"].tolist(), batch["completion_mask"].tolist(), strict=True):
            yield ids, [token if trained else -100 for token, trained in zip(ids, mask, strict=True)]


def axolotl(**dataset: Any) -> Loader:
    """Axolotl's `prepare_datasets` with these keys of a dataset's config."""

    def load(path: Path, tokenizer: Path) -> Rows:
        os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
        sft = importlib.import_module("axolotl.utils.data.sft")
        made = importlib.import_module("axolotl.utils.dict").DictDefault
        config = {
            "datasets": [made({"path": str(path), "ds_type": "json", **dataset})],
            "dataset_prepared_path": str(path.parent / "prepared"),
            "sequence_len": 2048,
            "val_set_size": 0,
            "seed": 1,
            "num_epochs": 1,
            "dataset_num_proc": 1,
            "batch_size": 1,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "world_size": 1,
        }
        rows, *_ = sft.prepare_datasets(made(config), _tokenizer(tokenizer))
        return [(row["input_ids"], row["labels"]) for row in rows]

    return load


def llamafactory(formatting: str, *, mask_history: bool) -> Loader:
    """LLaMA-Factory's converter, its own template `qwen` (not the tokenizer's) and its supervised processor."""

    def load(path: Path, tokenizer: Path) -> Rows:
        sys.modules.setdefault("torchaudio", types.ModuleType("torchaudio"))  # wants CUDA; only audio needs it
        os.environ["DISABLE_VERSION_CHECK"] = "1"  # it wants an older transformers
        data = importlib.import_module("llamafactory.data")
        parser, converter = (importlib.import_module(f"llamafactory.data.{name}") for name in ("parser", "converter"))
        supervised = importlib.import_module("llamafactory.data.processor.supervised")
        arguments = importlib.import_module("llamafactory.hparams.data_args").DataArguments(
            template="qwen", cutoff_len=2048, mask_history=mask_history
        )
        attributes = parser.DatasetAttr("file", dataset_name=path.name)
        keys = {"formatting": formatting, "columns": {"tools": "tools"}}
        if formatting == "openai":
            keys["columns"]["messages"] = "messages"
            names = {"role": "role", "content": "content", "user": "user", "assistant": "assistant"}
            names |= {"observation": "tool", "function": "function", "system": "system"}
            keys["tags"] = {f"{name}_tag": value for name, value in names.items()}
        else:
            keys["columns"]["messages"] = "conversations"
        attributes.join(keys)
        model = _tokenizer(tokenizer)
        template = data.get_template_and_fix_tokenizer(model, arguments)
        processor = supervised.SupervisedDatasetProcessor(
            template=template, tokenizer=model, processor=None, data_args=arguments
        )
        convert = converter.get_dataset_converter(formatting, attributes, arguments)
        rows = [convert({"tools": "", **row}) for row in _dataset(path)]
        made = processor.preprocess_dataset({key: [row[key] for row in rows] for key in rows[0]})
        return list(zip(made["input_ids"], made["labels"], strict=True))

    return load


def verl(path: Path, tokenizer: Path) -> Rows:
    """verl's MultiTurnSFTDataset, of parquet."""
    vision = importlib.import_module("transformers.models.qwen2_vl.modeling_qwen2_vl")
    if not hasattr(vision, "Qwen2VLCausalLMOutputWithPast"):  # verl imports it by an older name
        vision.Qwen2VLCausalLMOutputWithPast = object  # type: ignore[attr-defined]
    dataset = importlib.import_module("verl.utils.dataset.multiturn_sft_dataset").MultiTurnSFTDataset
    rows = dataset(str(path), _tokenizer(tokenizer), {"max_length": 2048, "pad_mode": "no_padding"})
    for at in range(len(rows)):
        ids, mask = rows[at]["input_ids"].tolist(), rows[at]["loss_mask"].tolist()
        yield ids, [token if trained else -100 for token, trained in zip(ids, mask, strict=True)]


TURNS = {"format": "messages", "per_turn": True}
WEIGHTED = {"type": "chat_template", "message_field_training": "weight"}
SHAREGPT = {
    "field_messages": "conversations",
    "message_property_mappings": {"role": "from", "content": "value"},
    "roles": {"user": ["human"], "assistant": ["gpt", "function_call"], "tool": ["observation"], "system": ["system"]},
}
LOADS: dict[str, tuple[dict[str, Any], str, Loader]] = {  # options, suffix, loader
    "`prompt-completion` in TRL `SFTTrainer`": ({"format": "prompt-completion"}, ".jsonl", trl_sft),
    "`tokens` in TRL `SFTTrainer`": ({"format": "tokens"}, ".jsonl", trl_sft),
    "`messages` in TRL `SFTTrainer`, its default": ({"format": "messages"}, ".jsonl", trl_sft),
    "`messages` in axolotl, `message_field_training: weight`": ({"format": "messages"}, ".jsonl", axolotl(**WEIGHTED)),
    "`sharegpt` in axolotl, likewise": ({"format": "sharegpt"}, ".jsonl", axolotl(**WEIGHTED, **SHAREGPT)),
    "`tokens` in axolotl": ({"format": "tokens"}, ".jsonl", axolotl(type="completion")),
    "`messages --per-turn` in LLaMA-Factory `openai`, `mask_history`": (
        TURNS,
        ".jsonl",
        llamafactory("openai", mask_history=True),
    ),
    "`sharegpt --per-turn` in LLaMA-Factory, `mask_history`": (
        {**TURNS, "format": "sharegpt"},
        ".jsonl",
        llamafactory("sharegpt", mask_history=True),
    ),
    "`messages` parquet in verl `MultiTurnSFTDataset`": ({"format": "messages"}, ".parquet", verl),
}


def count(load: str, name: str, folder: Path) -> tuple[int, int, Counter[int]]:
    """Tokens that a trainer takes loss on, those of the record, and by id those that only the trainer has."""
    options, suffix, loader = LOADS[load]
    tokenizer = write_tokenizer(folder / "tokenizer", CHATML)
    group, generated = recorded(name, _tokenizer(tokenizer))
    output = folder / f"o{suffix}"
    export_sft(write_groups(folder / "a.jsonl", [group]), output, options=SftOptions(**options, overwrite=True))
    trained = [label for _, labels in loader(output, tokenizer) for label in labels if label != -100]
    return len(trained), len(generated), Counter(trained) - Counter(generated)


def count_pairs(name: str, folder: Path) -> tuple[int, int, Counter[int]]:
    """The same of `atropos-dpo-gen`'s `trl` in TRL's DPOTrainer, of both sides."""
    tokenizer = write_tokenizer(folder / "tokenizer", CHATML)
    group, generated = recorded(name, _tokenizer(tokenizer))
    doubled = {key: value * 2 if key != "tools" else value for key, value in group.items() if key != "item_key"}
    rollouts = write_groups(folder / "a.jsonl", [{**doubled, "scores": [1.0, 0.0], "item_key": "0"}])
    export_dpo(rollouts, folder / "o.jsonl", options=DpoOptions(overwrite=True))
    trained = [label for _, labels in trl_dpo(folder / "o.jsonl", tokenizer) for label in labels if label != -100]
    return len(trained), 2 * len(generated), Counter(trained) - Counter(generated * 2)


def _dataset(path: Path) -> Any:
    datasets = importlib.import_module("datasets")
    cache = str(path.parent / "cache")
    return datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache)


def _tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def _tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))


def cell(counted: Callable[[], tuple[int, int, Counter[int]]], tokenizer: Any) -> str:
    """One cell of the table."""
    try:
        trained, generated, more = counted()
    except NothingKept:
        return "set aside"
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first[:60]}"
    others = tokenizer.decode([*more.elements()])
    return f"{trained} / {generated}" + (
        f" ({json.dumps(others)})" if others and len(others) < 9 else " (!)" * bool(more)
    )


def main() -> None:
    """Print the table as markdown."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    wanted = sys.argv[1:]
    print("| format and loader | " + " | ".join(CHATS) + " |\n|---|" + "---|" * len(CHATS))
    with tempfile.TemporaryDirectory() as top:
        tokenizer = _tokenizer(write_tokenizer(Path(top, "tokenizer"), CHATML))
        counts = {load: lambda name, folder, load=load: count(load, name, folder) for load in LOADS}
        counts["dpo `trl` in TRL `DPOTrainer`, both sides"] = count_pairs
        for row, (load, counted) in enumerate(counts.items()):
            if wanted and not any(word in load for word in wanted):
                continue
            cells = []
            for at, name in enumerate(CHATS):
                folder = Path(top, f"{row}-{at}")
                folder.mkdir()
                cells.append(cell(lambda name=name, folder=folder, counted=counted: counted(name, folder), tokenizer))
            print(f"| {load} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
