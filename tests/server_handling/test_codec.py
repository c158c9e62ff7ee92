"""The codec gives what the tokenizer gives, with and without its backend."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from atroposlib.envs.server_handling.sequence import Codec
from tests.fakes import EOS, FakeTokenizer

END = "<|im_end|>"


def byte_tokenizer(cls=PreTrainedTokenizerFast, **options):
    """A Hugging Face tokenizer with one token for each byte, `<|im_end|>` and a word that is no special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = cls(tokenizer_object=backend, eos_token=END, **options)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, token_ids, **options):
        return super()._decode(token_ids, **options).upper()


TOKENIZERS = {
    "plain": byte_tokenizer(),
    "cleans up spaces": byte_tokenizer(
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    ),
    "decodes in its own way": byte_tokenizer(Shouting),
    "not of transformers": FakeTokenizer(),
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(max_examples=50, deadline=None)
@given(text=st.text(st.sampled_from("ab é,.!'\n n't"), max_size=20), ends=st.integers(0, 2))
def test_codec_gives_what_the_tokenizer_gives(tokenizer, text, ends):
    codec = Codec(tokenizer)
    ids = codec.encode(text + END * ends, add_special_tokens=False)
    assert ids == list(tokenizer.encode(text + END * ends, add_special_tokens=False))
    for skip in (True, False):
        assert codec.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert codec.split_tail(ids) == (ids[: len(ids) - ends], [tokenizer.eos_token_id] * ends)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 265), max_size=30))
def test_any_ids_have_the_text_that_the_tokenizer_gives(ids):
    """Bytes that are no UTF-8, special tokens in the middle, an added word, and ids that do not exist."""
    tokenizer = TOKENIZERS["plain"]
    for skip in (True, False):
        text = Codec(tokenizer).decode(ids, skip_special_tokens=skip)
        assert text == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_token_that_is_added_later_is_decoded():
    tokenizer = byte_tokenizer()
    codec, new = Codec(tokenizer), len(tokenizer)
    assert codec.decode([new], skip_special_tokens=True) == ""
    tokenizer.add_tokens(["né w"])
    assert codec.decode([new], skip_special_tokens=True) == "né w"


def test_only_a_tokenizer_that_adds_nothing_to_its_backend_is_bypassed():
    bypassed = {name for name, tokenizer in TOKENIZERS.items() if Codec(tokenizer)._backend is not None}
    assert bypassed == {"plain"}


@pytest.mark.parametrize("name", ["plain", "decodes in its own way"])
def test_a_word_that_is_no_special_token_is_no_end_token(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(f"a<tool>{END}", add_special_tokens=False)
    assert Codec(tokenizer).split_tail(ids) == (ids[:2], [tokenizer.eos_token_id])


def test_truncation_left_on_by_other_code_does_not_cut_a_prompt():
    tokenizer = byte_tokenizer()
    codec = Codec(tokenizer)
    tokenizer("a long text", truncation=True, max_length=3)
    assert len(codec.encode("a long text", add_special_tokens=False)) == 11


def test_end_tokens_of_the_byte_tokenizer_are_split_off():
    assert Codec(FakeTokenizer()).split_tail([104, 105, EOS, EOS]) == ([104, 105], [EOS, EOS])
