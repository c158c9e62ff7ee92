"""Settings that an environment cannot use are refused in a sentence before anything is asked."""

import runpy
import sys

import pytest

from atroposlib.envs import catalog
from atroposlib.envs.cli import resolve
from atroposlib.errors import ConfigError

WRONG = {
    "letter_counting": ("--env.levels", "[0]", "greater than or equal to 1"),
    "graph_coloring": ("--env.levels", "[-3]", "greater than 0"),
    "text_reversal": ("--env.levels", "[0]", "greater than 0"),
    "instruction_following": ("--env.levels", "[0]", "greater than 0"),
    "pydantic_schema_following": ("--env.levels", "[0]", "greater than 0"),
    "answer_format": ("--env.supported_formats", '["NOPE"]', "there is no form 'NOPE'; there are JSON, JSON_ARRAY"),
    "causal": ("--env.difficulty", "9", "there is no 'difficulty_9'; levels are difficulty_1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_setting_that_cannot_be_used_is_refused_with_what_can(name):
    flag, value, says = WRONG[name]
    with pytest.raises(ConfigError) as refused:
        resolve(catalog.load(name), "process", [flag, value])
    assert says in str(refused.value)
    assert "which is not list" not in str(refused.value)
    assert "Value error" not in str(refused.value)


def test_names_of_forms_may_be_written_small():
    resolve(catalog.load("answer_format"), "process", ["--env.supported_formats", '["json"]'])


def test_the_surrogate_says_what_it_needs_where_torch_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "atroposlib.environments.causal.surrogate", raising=False)
    with pytest.raises(SystemExit, match=r"the surrogate needs torch: pip install 'atroposlib\[trainer\]'"):
        runpy.run_module("atroposlib.environments.causal.surrogate", run_name="__main__")
