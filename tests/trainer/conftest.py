"""The trainer's tests need torch: without it this folder is skipped as a whole."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]

if not collect_ignore_glob:
    import os

    import pytest

    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    @pytest.fixture(scope="session")
    def tiny_model(tmp_path_factory):
        """Folder of a small random Llama."""
        from tiny_model import write_tiny_model

        return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
