"""The trainer's tests need torch: without it this folder is skipped as a whole."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
