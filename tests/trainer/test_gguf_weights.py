import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import LlamaConfig, LlamaForCausalLM

from atroposlib.errors import ModelError
from atroposlib.example_trainer.gguf_weights import GGUFExporter, from_gguf_rows, hugging_face_name, to_gguf_rows

HEADS, KV_HEADS = 4, 2


def test_row_order_goes_there_and_back():
    weights = np.random.default_rng(0).normal(size=(32, 5))
    assert np.array_equal(from_gguf_rows(to_gguf_rows(weights, HEADS), HEADS), weights)
    assert not np.array_equal(to_gguf_rows(weights, HEADS), weights)


def test_halves_of_a_head_become_neighbours():
    rows = np.arange(8)[:, None]
    assert to_gguf_rows(rows, 1).ravel().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert to_gguf_rows(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.11.attn_k.weight": "model.layers.11.self_attn.k_proj.weight",
    "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
}


@pytest.mark.parametrize(("gguf", "expected"), NAMES.items())
def test_names(gguf, expected):
    assert hugging_face_name(gguf) == expected


def test_another_architectures_tensor_is_refused():
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_a"):
        hugging_face_name("blk.0.ssm_a.weight")


def test_a_file_of_another_architecture_is_refused_before_anything_is_trained(tmp_path):
    writer = GGUFWriter(tmp_path / "other.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"architecture 'qwen2'.*engine sglang or vllm"):
        GGUFExporter(tmp_path / "other.gguf")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            tie_word_embeddings=True,
        )
    )


PARTS = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm", "ffn_norm"]
GGUF_NAMES = ["token_embd", "output_norm", *(f"blk.{i}.{part}" for i in range(2) for part in PARTS)]


@pytest.fixture
def template(model, tmp_path):
    """A GGUF file of the model's shapes, all zeros."""
    path = tmp_path / "template.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_block_count(2)
    writer.add_token_list([f"w{i}" for i in range(48)])
    for name in GGUF_NAMES:
        shape = model.state_dict()[hugging_face_name(f"{name}.weight")].shape
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path):
    return {tensor.name: np.array(tensor.data) for tensor in GGUFReader(path).tensors}


def test_exported_tensors_are_the_models_in_gguf_order(model, template, tmp_path):
    GGUFExporter(template).write(model.state_dict(), tmp_path / "out.gguf")
    found, state = read(tmp_path / "out.gguf"), model.state_dict()
    query = to_gguf_rows(state["model.layers.1.self_attn.q_proj.weight"].numpy(), HEADS)
    np.testing.assert_array_equal(found["blk.1.attn_q.weight"], query.astype(np.float16))
    value = state["model.layers.1.self_attn.v_proj.weight"].numpy()
    np.testing.assert_array_equal(found["blk.1.attn_v.weight"], value.astype(np.float16))
    assert found["blk.0.attn_norm.weight"].dtype == np.float32


@pytest.mark.parametrize("dtype", ["F16", "F32", "Q8_0"])
def test_a_second_export_holds_the_weights_of_its_time(model, template, tmp_path, dtype):
    later = {name: value + 0.25 for name, value in model.state_dict().items()}
    exporter = GGUFExporter(template, dtype)
    exporter.write(model.state_dict(), tmp_path / "first.gguf")
    exporter.write(later, tmp_path / "second.gguf")
    GGUFExporter(template, dtype).write(later, tmp_path / "other.gguf")
    assert (tmp_path / "second.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()
    assert not np.array_equal(
        read(tmp_path / "second.gguf")["blk.0.attn_q.weight"], read(tmp_path / "first.gguf")["blk.0.attn_q.weight"]
    )


def test_a_model_that_lacks_a_tensor_is_refused_and_no_file_is_left(model, template, tmp_path):
    state = dict(model.state_dict())
    del state["model.norm.weight"]
    with pytest.raises(ModelError, match=r"has no model\.norm\.weight"):
        GGUFExporter(template).write(state, tmp_path / "out.gguf")
    assert not list(tmp_path.glob("*out*"))
