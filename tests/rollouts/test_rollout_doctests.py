"""The examples in the docstrings of the runtime hold."""

import doctest
import importlib

import pytest

MODULES = [
    "atroposlib.backoff",
    "atroposlib.charts",
    "atroposlib.data.formats",
    "atroposlib.cli.cluster",
    "atroposlib.launch.plan",
    "atroposlib.launch.preflight",
    "atroposlib.status.table",
    "atroposlib.system_limits",
    "atroposlib.rollouts.journal",
    "atroposlib.rollouts.early_stop",
    "atroposlib.rollouts.pacing",
    "atroposlib.data.rollout_files",
    "atroposlib.rollouts.trace",
    "atroposlib.utils.cli",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), extraglobs={})
    assert (result.failed, result.attempted > 0) == (0, True)
