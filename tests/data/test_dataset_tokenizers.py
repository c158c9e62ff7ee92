import copy
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from atroposlib.data.tokenizers import check_ids, load_tokenizer
from atroposlib.errors import DataError, ModelError, PathError
from atroposlib_engine import models


def test_a_folder_is_a_tokenizer(tokenizer_dir):
    assert load_tokenizer(str(tokenizer_dir)).chat_template


CHAT = [{"role": "user", "content": "hi"}]


def test_a_chat_becomes_a_list_of_ids_unless_a_dictionary_is_asked_for(tokenizer_dir):
    tokenizer = load_tokenizer(str(tokenizer_dir))
    ids = tokenizer.encode(tokenizer.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)
    assert tokenizer.apply_chat_template(CHAT) == tokenizer.apply_chat_template(CHAT, return_dict=False) == ids
    assert tokenizer.apply_chat_template([CHAT, CHAT]) == [ids, ids]
    assert tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"] == ids


COPIES = {"pickled": lambda one: pickle.loads(pickle.dumps(one)), "copied": copy.copy, "deeply": copy.deepcopy}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_loaded_tokenizer_stays_what_it_is_for_everybody_else(tokenizer_dir, tmp_path, copied):
    plain = AutoTokenizer.from_pretrained(str(tokenizer_dir))
    tokenizer = copied(load_tokenizer(str(tokenizer_dir)))
    assert isinstance(tokenizer, type(plain))
    assert type(tokenizer).__name__ == type(plain).__name__
    assert tokenizer.apply_chat_template(CHAT) == plain.apply_chat_template(CHAT, return_dict=False)
    tokenizer.save_pretrained(tmp_path)
    assert type(AutoTokenizer.from_pretrained(str(tmp_path))) is type(plain)


def test_a_gguf_brings_its_own_tokenizer(tokenizer_dir, monkeypatch):
    asked = []
    monkeypatch.setattr(
        models, "resolve_model", lambda spec: asked.append(spec) or SimpleNamespace(tokenizer_dir=Path(tokenizer_dir))
    )
    assert len(load_tokenizer("somewhere/model.gguf")) == len(load_tokenizer("smollm2-135m"))
    assert asked == ["somewhere/model.gguf", "smollm2-135m"]


def test_a_missing_gguf_is_said(tmp_path):
    with pytest.raises((ModelError, PathError), match="nothing"):
        load_tokenizer(str(tmp_path / "nothing.gguf"))


WRONG = {
    "empty folder": ("", "not a tokenizer folder"),
    "unreachable hub name": ("nobody/no-such-model", "neither a folder here nor"),
}


@pytest.mark.parametrize(("spec", "reason"), WRONG.values(), ids=WRONG)
def test_what_is_no_tokenizer_is_one_sentence(tmp_path, spec, reason):
    with pytest.raises(ModelError, match=reason) as caught:
        load_tokenizer(spec or str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ids", [[5, 10], [-1, 3]])
def test_ids_outside_the_vocabulary_are_refused(ids):
    check_ids([0, 9], 10, "a.jsonl:1[0]")
    with pytest.raises(DataError, match=r"a\.jsonl:1\[0\]: token id (10|-1) is outside"):
        check_ids(ids, 10, "a.jsonl:1[0]")
