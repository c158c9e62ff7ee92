"""Weights between GGUF files (llama.cpp) and Hugging Face folders, both ways, for models of the Llama architecture.

The two disagree about rotary embeddings: GGUF pairs neighbouring rows of Q and K, Hugging Face pairs the two halves of
a head. `to_gguf_rows` and its inverse reorder the rows; without it the model answers nonsense and raises no error.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from atroposlib.errors import ModelError
from atroposlib_engine.gguf_files import encoded, metadata, read_gguf, write_gguf
from atroposlib_engine.models import LocalModel, built_beside, cache_dir, resolve_model

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
        try:
            with built_beside(folder.parent, folder) as making:
                _write_folder(model, making)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    return folder


class GGUFExporter:
    """Writes weights in training as GGUF files that differ from a template only in their tensors."""

    def __init__(self, template: Path, dtype: str = "F16") -> None:
        self._reader = read_gguf(template)
        self._dtype = dtype
        self._heads = _head_counts(self._reader)

    def write(self, state: Mapping[str, Tensor], target: Path) -> None:
        """Write `target`; after an error there is none.

        Args:
            state: names as in the Hugging Face model.

        Raises:
            ModelError: a tensor of the template has no counterpart in `state`.
        """
        try:
            tensors = (self._tensor(state, tensor.name) for tensor in self._reader.tensors)
            write_gguf(self._reader, target, self._dtype, tensors)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _tensor(self, state: Mapping[str, Tensor], name: str) -> tuple[str, np.ndarray, str]:
        """Name, data as the file holds it, and type: vectors stay F32, as llama.cpp wants them."""
        source, part = hugging_face_name(name), name.split(".")[-2]
        if source not in state:
            raise ModelError(f"the engine's model has {name}, but the trained one has no {source}; are they the same?")
        weights = state[source].float().numpy()
        if part in self._heads:
            weights = to_gguf_rows(weights, self._heads[part])
        kind = "F32" if weights.ndim == 1 else self._dtype
        return name, encoded(weights, kind), kind


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
