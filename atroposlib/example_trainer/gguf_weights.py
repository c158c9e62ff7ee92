"""Weights between GGUF files (llama.cpp) and Hugging Face folders, both ways, for models of the Llama architecture.

The two disagree about rotary embeddings: GGUF pairs neighbouring rows of Q and K, Hugging Face pairs the two halves of
a head. `to_gguf_rows` and its inverse reorder the rows; without it the model answers nonsense and raises no error.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from atroposlib.errors import ModelError
from atroposlib_engine.gguf_files import metadata, read_gguf
from atroposlib_engine.models import LocalModel, cache_dir, resolve_model

if TYPE_CHECKING:
    from gguf import GGUFReader

_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hugging_face_folder(spec: str) -> Path:
    """The Hugging Face folder of an embedded model: float32 weights, config, tokenizer. Made once, then cached."""
    model = resolve_model(spec)
    stamp = f"{model.name}-{model.gguf.stat().st_size}-{model.gguf.stat().st_mtime_ns}"
    folder = cache_dir() / "hugging_face" / stamp
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=".making.", dir=folder.parent))
        try:
            _write_folder(model, making)
            os.replace(making, folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return folder


class GGUFExporter:
    """Writes weights in training as GGUF files that differ from a template only in their tensors.

    The first file is written in full; later ones reuse its header and overwrite the tensors, which is about ten
    times faster.
    """

    def __init__(self, template: Path, dtype: str = "F16") -> None:
        self._reader = read_gguf(template)
        self._dtype = dtype
        self._heads = _head_counts(self._reader)
        self._header = b""
        self._places: dict[str, int] = {}  # tensor name -> offset in the file

    def write(self, state: Mapping[str, Tensor], target: Path) -> None:
        """Write `target` whole or not at all.

        Args:
            state: names as in the Hugging Face model.

        Raises:
            ModelError: a tensor of the template has no counterpart in `state`, or another shape.
        """
        making = target.with_name(f".{target.name}.making")
        try:
            if self._header:
                self._write_tensors(state, making)
            else:
                self._write_in_full(state, making)
            os.replace(making, target)
        finally:
            making.unlink(missing_ok=True)

    def _write_in_full(self, state: Mapping[str, Tensor], target: Path) -> None:
        from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

        reader = self._reader
        writer = GGUFWriter(target, str(metadata(reader, "general.architecture")))
        for key, field in reader.fields.items():
            if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
                continue
            is_array = field.types[0] == GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)
        writer.add_file_type({"F32": 0, "F16": 1, "Q8_0": 7}[self._dtype])
        for tensor in reader.tensors:
            data, kind = self._encoded(state, tensor.name)
            writer.add_tensor(tensor.name, data, raw_dtype=GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        written = GGUFReader(target)
        self._places = {tensor.name: int(tensor.data_offset) for tensor in written.tensors}
        with target.open("rb") as stream:
            self._header = stream.read(min(self._places.values()))

    def _write_tensors(self, state: Mapping[str, Tensor], target: Path) -> None:
        with target.open("wb") as stream:
            stream.write(self._header)
            for name, offset in self._places.items():
                stream.seek(offset)
                stream.write(self._encoded(state, name)[0].tobytes())

    def _encoded(self, state: Mapping[str, Tensor], name: str) -> tuple[np.ndarray, str]:
        """One tensor as the file holds it, and its type: vectors stay F32, as llama.cpp wants them."""
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        source = hugging_face_name(name)
        if source not in state:
            raise ModelError(f"the engine's model has {name}, but the trained one has no {source}; are they the same?")
        weights = state[source].float().numpy()
        if name.split(".")[-2] in self._heads:
            weights = to_gguf_rows(weights, self._heads[name.split(".")[-2]])
        kind = "F32" if weights.ndim == 1 else self._dtype
        if kind == "Q8_0":
            return quantize(weights, GGMLQuantizationType.Q8_0), kind
        return np.ascontiguousarray(weights, np.float32 if kind == "F32" else np.float16), kind


def to_gguf_rows(weights: np.ndarray, heads: int) -> np.ndarray:
    """[rows, columns] of a Q or K projection: halves of a head become neighbouring pairs."""
    rows, columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def from_gguf_rows(weights: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `to_gguf_rows`."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        ModelError: the name belongs to another architecture.
    """
    *where, suffix = name.split(".")
    if len(where) == 1 and where[0] in _WHOLE:
        return f"{_WHOLE[where[0]]}.{suffix}"
    if len(where) == 3 and where[0] == "blk" and where[2] in _PARTS:
        return f"model.layers.{where[1]}.{_PARTS[where[2]]}.{suffix}"
    raise ModelError(f"GGUF tensor {name!r} is not one of the Llama architecture; only such models can be converted")


def _head_counts(reader: "GGUFReader") -> dict[str, int]:
    """Heads of the projections whose rows are reordered."""
    architecture = metadata(reader, "general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"the GGUF file has architecture {architecture!r}; only 'llama' can be converted between GGUF and Hugging "
            "Face. Train it with engine sglang or vllm, which load the Hugging Face folder"
        )
    return {"attn_q": _number(reader, "attention.head_count"), "attn_k": _number(reader, "attention.head_count_kv")}


def _number(reader: "GGUFReader", key: str) -> int:
    value = metadata(reader, f"llama.{key}")
    if not isinstance(value, int):
        raise ModelError(f"the GGUF file has no llama.{key}; it cannot be converted")
    return value


def _write_folder(model: LocalModel, folder: Path) -> None:
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = read_gguf(model.gguf)
    heads = _head_counts(reader)
    state: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weights = from_gguf_rows(weights, heads[part])
        state[hugging_face_name(tensor.name)] = torch.from_numpy(np.array(weights, dtype=np.float32))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(reader, state), indent=1), encoding="utf-8")
    for path in model.tokenizer_dir.iterdir():
        shutil.copy(path, folder / path.name)


def _config(reader: "GGUFReader", state: Mapping[str, Tensor]) -> dict[str, object]:
    vocabulary, width = state["model.embed_tokens.weight"].shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": _number(reader, "feed_forward_length"),
        "num_hidden_layers": _number(reader, "block_count"),
        "num_attention_heads": _number(reader, "attention.head_count"),
        "num_key_value_heads": _number(reader, "attention.head_count_kv"),
        "max_position_embeddings": _number(reader, "context_length"),
        "rms_norm_eps": metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata(reader, "llama.rope.freq_base"),
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": "lm_head.weight" not in state,
        "dtype": "float32",
    }
