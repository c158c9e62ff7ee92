from pathlib import Path
from types import SimpleNamespace

import pytest

from atroposlib.data.tokenizers import check_ids, load_tokenizer
from atroposlib.engines import models
from atroposlib.errors import DataError, ModelError, PathError


def test_a_folder_is_a_tokenizer(tokenizer_dir):
    assert load_tokenizer(str(tokenizer_dir)).chat_template


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
    "unreachable hub name": ("nobody/no-such-model", "neither a folder here nor on the hub"),
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
