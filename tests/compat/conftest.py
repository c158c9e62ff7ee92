"""Tests next to upstream's last release.

They install it from PyPI (minutes, once), so they run only when asked:

    ATROPOS_COMPAT=1 python -m pytest tests/compat

ATROPOS_COMPAT_VENV names the folder of the side environment; default: in the user's cache.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.services import HERE, Package, Services

UPSTREAM = "atroposlib==0.4.0"
UNDECLARED = ["requests", "python-dotenv"]  # upstream imports them without saying so


def pytest_collection_modifyitems(items):
    if os.environ.get("ATROPOS_COMPAT") == "1":
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason="set ATROPOS_COMPAT=1: it installs upstream's release from PyPI"))


@pytest.fixture(scope="session")
def packages():
    """By name: "ours" is what runs the tests, "upstream" a side environment."""
    cache = Path(os.environ.get("ATROPOS_CACHE", Path.home() / ".cache" / "atroposlib"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = Path(os.environ.get("ATROPOS_COMPAT_VENV", cache / f"compat-{UPSTREAM.replace('==', '-')}-py{version}"))
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", UPSTREAM, *UNDECLARED], check=True)
        (folder / "ready").touch()
    return {"ours": Package("ours", sys.executable), "upstream": Package("upstream", str(python))}


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    """A byte-level tokenizer with a ChatML template, as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=specials))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def services(tmp_path, tokenizer_dir):
    running = Services(tmp_path, tokenizer_dir)
    yield running
    running.stop()
