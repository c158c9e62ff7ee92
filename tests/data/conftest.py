"""Fixtures shared by the dataset tests."""

import pytest
from small_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    """A ChatML tokenizer folder."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
