"""Log-probabilities from hidden states against those from the model's own logits."""

import pytest
import torch
import transformers
from tiny_model import VOCABULARY, make_group

from atroposlib.errors import ModelError
from atroposlib.example_trainer import token_scores as scoring
from atroposlib.example_trainer.data import rows_of
from atroposlib.example_trainer.layout import collate
from atroposlib.example_trainer.token_scores import require_known_logits, token_scores

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
MODELS = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
}


def make_model(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name], attn_implementation="eager")
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.fixture
def micro():
    rows = rows_of([make_group([1, 0, 0], completions=[3, 9, 5])], seq_len=64, temperature=0.7)
    return collate(rows, [[0, 1, 2]])


@pytest.mark.parametrize("name", MODELS)
def test_the_scores_are_those_of_the_models_own_logits(name, micro):
    model = make_model(name)
    found = token_scores(model, micro, entropy=True)
    logits = model(
        input_ids=micro.input_ids, attention_mask=micro.attention_mask, position_ids=micro.position_ids, use_cache=False
    ).logits
    expected = (logits[0][micro.predictors] / 0.7).log_softmax(-1)
    chosen = expected.gather(-1, micro.targets[:, :, None])[:, :, 0]
    torch.testing.assert_close(found.logp, chosen * micro.mask, atol=1e-5, rtol=1e-5)
    assert found.entropy is not None
    torch.testing.assert_close(found.entropy, -(expected.exp() * expected).sum(-1) * micro.mask, atol=1e-5, rtol=1e-5)


def test_slices_change_neither_the_scores_nor_the_gradient(micro, monkeypatch):
    model = make_model("Llama")
    whole = token_scores(model, micro, entropy=True)
    whole.logp.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    monkeypatch.setitem(scoring.SLICE_LOGITS, "cpu", 4 * VOCABULARY)  # 17 trained tokens make 5 slices
    sliced = token_scores(model, micro, entropy=True)
    both = [[scores.logp, scores.entropy] for scores in (sliced, whole)]
    torch.testing.assert_close(*both, atol=1e-6, rtol=1e-6)
    sliced.logp.sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_no_score(name):
    rows = rows_of([make_group([1, 0], completions=[3, 9])], seq_len=64, temperature=0.7)
    model = make_model(name)
    alone, padded = (token_scores(model, collate(rows, lines), entropy=True) for lines in ([[0]], [[0], [1]]))
    torch.testing.assert_close(padded.logp[:1, : alone.logp.shape[1]], alone.logp, atol=1e-5, rtol=1e-5)


def test_the_gradient_of_the_scores_is_autograds():
    logits = torch.randn(5, 11, dtype=torch.float64).bfloat16().float().requires_grad_()
    targets, temperature = torch.tensor([0, 3, 10, 3, 7]), torch.tensor([0.7, 1.0, 1.3, 0.1, 2.0])
    factors = torch.randn(5)
    logp, entropy = scoring._Scores.apply(logits, targets, temperature, True)
    plain = (logits / temperature[:, None]).log_softmax(-1)
    torch.testing.assert_close(logp, plain.gather(-1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(plain.exp() * plain).sum(-1))
    (found,) = torch.autograd.grad((logp * factors).sum(), logits)
    (expected,) = torch.autograd.grad((plain.gather(-1, targets[:, None])[:, 0] * factors).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_rows_without_a_trained_token_have_scores_of_zero():
    rows = rows_of([make_group([1, 0], completions=[3, 4])], seq_len=64, temperature=1.0)
    for row in rows:
        row.trained[:] = False
    found = token_scores(make_model("Llama"), collate(rows, [[0, 1]]), entropy=True)
    assert found.entropy is not None
    assert not found.logp.any()
    assert not found.entropy.any()


@pytest.mark.parametrize("name", MODELS)
def test_what_these_architectures_do_to_their_logits_is_known(name):
    require_known_logits(make_model(name))


def test_an_architecture_that_does_more_to_its_logits_is_refused(monkeypatch):
    monkeypatch.setattr(scoring, "_logits", lambda model, hidden: model.get_output_embeddings()(hidden))
    with pytest.raises(ModelError, match="GraniteForCausalLM makes logits in a way"):
        require_known_logits(make_model("Granite"))
