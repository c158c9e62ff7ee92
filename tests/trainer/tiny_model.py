"""A Llama of 20,000 parameters with a tokenizer of 64 words, made in a moment, and groups to train it on."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from atroposlib.example_trainer.config import TrainingConfig

VOCABULARY = 64


def write_tiny_model(folder: Path, *, vocabulary: int = VOCABULARY) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(folder)
    return folder


def make_group(
    scores: list[float], *, prompt: int = 3, completions: list[int] | None = None, seed: int = 0, **extra: Any
) -> dict[str, Any]:
    """A group of random tokens; sequence i has `completions[i]` trained ones."""
    generator = torch.Generator().manual_seed(seed)
    lengths = completions or [4 + i for i in range(len(scores))]
    tokens = [torch.randint(3, VOCABULARY, (prompt + length,), generator=generator).tolist() for length in lengths]
    return {
        "tokens": tokens,
        "masks": [[-100] * prompt + ids[prompt:] for ids in tokens],
        "scores": scores,
        "inference_logprobs": [[1.0] * prompt + [-2.0] * length for length in lengths],
        **extra,
    }


def make_config(model: Path, save_path: Path, **changes: Any) -> TrainingConfig:
    values = {
        "model_name": str(model),
        "device": "cpu",
        "save_path": str(save_path),
        "log_dir": str(save_path / "logs"),
        "batch_size": 8,
        "gradient_accumulation_steps": 1,
        "training_steps": 4,
        "seq_len": 64,
        "max_completion_length": 32,
        "lr": 1e-3,
    }
    return TrainingConfig(**(values | changes))
