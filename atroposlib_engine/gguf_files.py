"""Files made from a GGUF file once: its Q8_0 twin, and a Hugging Face tokenizer folder.

Nothing here needs torch. `gguf` is imported inside the functions, so that a cached model starts without it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atroposlib.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

GGUF_MAGIC = b"GGUF"
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7}
_CONTROL_TOKEN = 3
_SPLITS_DIGITS = {"smollm": True, "gpt-2": False}  # tokenizer.ggml.pre -> is every digit a token of its own?


def read_gguf(path: Path) -> "GGUFReader":
    """The opened file; ModelError when it is missing, empty or not GGUF."""
    from gguf import GGUFReader

    if not path.is_file():
        raise ModelError(f"model file {path} does not exist; give a .gguf file or a model name")
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != GGUF_MAGIC:
        raise ModelError(f"{path} starts with {magic!r}, a GGUF file starts with {GGUF_MAGIC!r}; give another file")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} cannot be read as GGUF ({error}); it is probably cut off, fetch it again") from error


def metadata(reader: "GGUFReader", key: str) -> object | None:
    """One metadata value as plain Python (str, int, float, list), or None when the key is absent."""
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def context_length(reader: "GGUFReader") -> int:
    """Tokens the model was trained for."""
    length = metadata(reader, f"{metadata(reader, 'general.architecture')}.context_length")
    if not isinstance(length, int):
        raise ModelError("the GGUF file does not state its context length; it is not a language model")
    return length


def write_q8_0(reader: "GGUFReader", target: Path) -> None:
    """Write `target`: the same model with every smaller quantisation turned into Q8_0; F32 tensors stay as they are."""
    from gguf.quants import dequantize

    def tensors() -> Iterable[tuple[str, np.ndarray, str]]:
        for tensor in reader.tensors:
            kind = tensor.tensor_type.name
            if kind in _FILE_TYPES:
                yield tensor.name, tensor.data, kind
            else:
                yield tensor.name, encoded(dequantize(tensor.data, tensor.tensor_type), "Q8_0"), "Q8_0"

    write_gguf(reader, target, "Q8_0", tensors())


def write_gguf(
    reader: "GGUFReader", target: Path, file_type: str, tensors: Iterable[tuple[str, np.ndarray, str]]
) -> None:
    """Write `target` with the metadata of `reader` and other tensors: name, data as stored, type."""
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    writer = GGUFWriter(target, str(metadata(reader, "general.architecture")))
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue  # the writer sets these itself
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)
    writer.add_file_type(_FILE_TYPES[file_type])
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encoded(weights: np.ndarray, kind: str) -> np.ndarray:
    """Return float weights as a GGUF file of this type holds them."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return quantize(np.ascontiguousarray(weights), GGMLQuantizationType[kind])


def write_tokenizer_folder(reader: "GGUFReader", folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; ids are those llama.cpp gives.

    Raises:
        ModelError: a tokenizer other than GPT-2 style BPE with the pre-tokenizers listed above.
    """
    kind, pre = metadata(reader, "tokenizer.ggml.model"), metadata(reader, "tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _SPLITS_DIGITS:
        raise ModelError(
            f"the GGUF file has tokenizer {kind!r} with pre-tokenizer {pre!r}; a tokenizer folder can be made for "
            f"'gpt2' with {', '.join(sorted(_SPLITS_DIGITS))}; pass the model's own Hugging Face tokenizer instead"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [str(token) for token in _list(reader, "tokenizer.ggml.tokens")]
    special = [
        token for token, kind in zip(tokens, _list(reader, "tokenizer.ggml.token_type"), strict=True)
        if kind == _CONTROL_TOKEN
    ]  # fmt: skip
    merges = [tuple(str(merge).split(" ", 1)) for merge in _list(reader, "tokenizer.ggml.merges")]
    _build_bpe(tokens, merges, special, split_digits=_SPLITS_DIGITS[str(pre)]).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length(reader),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata(reader, "tokenizer.chat_template"),
        **_named_tokens(reader, tokens),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False), encoding="utf-8")


def _build_bpe(tokens: list[str], merges: list[tuple[str, ...]], special: list[str], *, split_digits: bool):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(left, right) for left, right in merges]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _named_tokens(reader: "GGUFReader", tokens: list[str]) -> dict[str, str]:
    """`{"eos_token": "<|im_end|>", ...}` for those the file names by id."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: metadata(reader, f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: tokens[index] for name, index in found.items() if isinstance(index, int)}


def _list(reader: "GGUFReader", key: str) -> list[object]:
    value = metadata(reader, key)
    if not isinstance(value, list):
        raise ModelError(f"the GGUF file has no list {key!r}; it cannot be used as a language model")
    return value
