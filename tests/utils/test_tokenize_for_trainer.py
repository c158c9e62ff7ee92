import numpy as np
import pytest
from chat_tokenizers import EOS, BatchEncodingTokenizer, CharTokenizer, ForgetfulTokenizer

from atroposlib.utils.tokenize_for_trainer import (
    UNMASKED_ROLES,
    chat_token_ids,
    plain_ids,
    tokenize_for_trainer,
    tokenize_for_trainer_dpo,
)

CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two"},
    {"role": "agent", "content": "last"},
]
TOKENIZERS = {"small stand-in": CharTokenizer(), "transformers 5": BatchEncodingTokenizer()}


@pytest.fixture(params=TOKENIZERS.values(), ids=TOKENIZERS)
def tokenizer(request):
    return request.param


def trained_text(tokenizer, tokenized):
    """What takes loss; other positions show as '.'."""
    assert len(tokenized["tokens"]) == len(tokenized["masks"])
    assert all(m in (-100, t) for t, m in zip(tokenized["tokens"], tokenized["masks"], strict=True))
    return "".join("." if mask == -100 else tokenizer.decode([mask]) for mask in tokenized["masks"]).strip(".")


def test_only_the_last_turn_is_trained_by_default(tokenizer):
    tokenized = tokenize_for_trainer(tokenizer, CHAT[:3])
    assert tokenizer.decode(tokenized["tokens"]) == "[system:s][user:one][assistant:first]"
    assert trained_text(tokenizer, tokenized) == "first]"


def test_every_assistant_and_agent_turn_is_trained_when_asked(tokenizer):
    assert UNMASKED_ROLES == ["assistant", "agent"]
    chat = [*CHAT[:4], {"role": "assistant", "content": "last"}]
    text = trained_text(tokenizer, tokenize_for_trainer(tokenizer, chat, train_on_all_assistant_turns=True))
    assert text.startswith("first]")
    assert text.endswith("last]")
    assert set(text[len("first]") : -len("last]")]) == {"."}


def test_a_length_stop_drops_the_end_id_the_template_added(tokenizer):
    whole = tokenize_for_trainer(tokenizer, CHAT[:3])
    cut = tokenize_for_trainer(tokenizer, CHAT[:3], finish_reason="length")
    assert whole["tokens"] == [*cut["tokens"], EOS]
    assert whole["masks"] == [*cut["masks"], EOS]


def test_a_stop_keeps_the_end_id(tokenizer):
    assert tokenize_for_trainer(tokenizer, CHAT[:3], finish_reason="stop")["tokens"][-1] == EOS


def test_messages_come_back_only_when_asked(tokenizer):
    assert "messages" not in tokenize_for_trainer(tokenizer, CHAT)
    assert tokenize_for_trainer(tokenizer, CHAT, include_messages=True)["messages"] is CHAT


def test_a_template_that_rewrites_history_is_reported(caplog):
    tokenize_for_trainer(ForgetfulTokenizer(), CHAT, train_on_all_assistant_turns=True)
    assert "renders the first 3 messages differently" in caplog.text


def test_no_messages_render_to_no_ids(tokenizer):
    assert chat_token_ids(tokenizer, []) == []


ENCODINGS = {
    "list": [1, 2],
    "batch of one": [[1, 2]],
    "mapping": {"input_ids": [1, 2]},
    "mapping of a batch": {"input_ids": [[1, 2]]},
    "array": np.array([1, 2]),
    "array of a batch": np.array([[1, 2]]),
    "tuple": (1, 2),
}


@pytest.mark.parametrize("encoded", ENCODINGS.values(), ids=ENCODINGS)
def test_plain_ids_of_everything_a_tokenizer_returns(encoded):
    assert plain_ids(encoded) == [1, 2]


def test_a_preference_pair_shares_its_prompt_and_trains_on_the_answers():
    pair = tokenize_for_trainer_dpo(CharTokenizer(), {"prompt": "ab", "chosen": "cd", "rejected": "e"})
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("ab", "cd", "e")
    assert pair["prompt_input_ids"] == [97, 98]
    assert pair["chosen_input_ids"] == [97, 98, 99, 100]
    assert pair["chosen_attention_mask"] == [1, 1, 1, 1]
    assert pair["chosen_labels"] == [-100, -100, 99, 100]
    assert pair["rejected_input_ids"] == [97, 98, 101]
    assert pair["rejected_labels"] == [-100, -100, 101]


def test_a_preference_pair_is_cut_at_its_end():
    pair = tokenize_for_trainer_dpo(CharTokenizer(), {"prompt": "ab", "chosen": "cd", "rejected": "e"}, max_length=3)
    assert pair["chosen_input_ids"] == [97, 98, 99]
    assert pair["chosen_labels"] == [-100, -100, 99]


def test_a_real_transformers_tokenizer_gives_plain_ids():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["<eos>"]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':' + m.content + '<eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenized = tokenize_for_trainer(tokenizer, CHAT[1:3])
    assert tokenizer.decode(tokenized["tokens"]) == "user:one<eos>assistant:first<eos>"
    assert tokenizer.decode([mask for mask in tokenized["masks"] if mask != -100]) == "first<eos>"
