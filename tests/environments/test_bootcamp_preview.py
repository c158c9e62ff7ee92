"""What a check says of the problems that a run would ask, and which runs are refused."""

import pytest

from atroposlib.environments.intern_bootcamp.bootcamp_config import InternBootcampEnvConfig
from atroposlib.environments.intern_bootcamp.checkout import module_faults
from atroposlib.environments.intern_bootcamp.intern_bootcamp_env import InternBootcampEnv
from atroposlib.environments.intern_bootcamp.problems import require_chosen_tasks
from atroposlib.envs.cli import main
from atroposlib.errors import ConfigError
from tests.environments.test_hosted_bootcamps import CHECKOUT

CHOICES = {
    "a checkout": {"internbootcamp_path": CHECKOUT},
    "weights": {"task_weights": {"addition": 1}},
    "one task": {"task_name": "addition"},
    "reasoning-gym": {"task_name": "reasoning_gym"},
}


def config(**settings) -> InternBootcampEnvConfig:
    return InternBootcampEnvConfig.model_validate(settings)


@pytest.mark.parametrize("settings", CHOICES.values(), ids=CHOICES)
def test_a_real_model_is_asked_what_was_chosen(settings):
    require_chosen_tasks(config(**settings), ["org/Model"])


def test_a_real_model_is_not_asked_toys_because_nothing_was_chosen():
    require_chosen_tasks(config(), ["smollm2-135m"])
    with pytest.raises(ConfigError) as refusal:
        require_chosen_tasks(config(), ["org/Model"])
    assert "no task is chosen for 'org/Model'" in str(refusal.value)
    assert "git clone https://github.com/InternLM/InternBootcamp ~/InternBootcamp" in str(refusal.value)
    assert "env.task_name reasoning_gym" in str(refusal.value)


def check(*words: str) -> int:
    return main(InternBootcampEnv, ["serve", "--check=settings", *words])


def test_a_check_shows_the_mixture_three_prompts_and_what_is_set_aside(capsys, tmp_path):
    (tmp_path / "quarantine.json").write_text('{"Hangsbootcamp": "no result after 10 s", "Hungrybootcamp": "memory"}')
    quarantine = ["--env.quarantine_path", str(tmp_path / "quarantine.json")]
    assert check("--env.internbootcamp_path", CHECKOUT, *quarantine) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"mixture: 8 tasks of {CHECKOUT}: Dividesbootcamp 12.5%, ")
    assert lines[1:4] == [
        f"2 tasks in quarantine ({tmp_path / 'quarantine.json'}):",
        "  1 x no result after 10 s",
        "  1 x memory",
    ]
    assert "1 task cannot be used here, and will be set aside after failing:" in lines
    assert "  1 x the package a_package_that_nobody_has is not installed" in lines
    assert sum(", asks: " in line for line in lines) == 3


def test_a_check_of_weights_needs_no_checkout(capsys):
    weights = '{"addition": 3, "capitals": 1}'
    assert check("--env.task_weights", weights, "--env.internbootcamp_path", "/nowhere") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mixture: 2 tasks: addition 75.0%, capitals 25.0%"
    assert "problem 0, addition, asks: What is " in lines[1]


def test_a_check_without_a_choice_is_a_usage_error(capsys):
    assert check() == 2
    assert capsys.readouterr().err.startswith("error: no task is chosen for 'deepseek-ai/DeepSeek-R1': ")


def test_all_datasets_of_reasoning_gym_are_a_mixture(capsys):
    assert check("--env.task_name", "reasoning_gym") == 0
    out = capsys.readouterr().out
    assert "reasoning_gym:" in out.splitlines()[0]
    assert int(out.split("mixture: ")[1].split()[0]) > 50


def test_files_tell_which_classes_cannot_be_imported(tmp_path):
    package = tmp_path / "internbootcamp" / "bootcamp"
    for name, text in {
        "good": "import json\nfrom internbootcamp.libs import x\nfrom bootcamp import Basebootcamp\n",
        "package": "from .inner import Cbootcamp\n",
        "broken": "def (",
    }.items():
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text(text)
    (package / "package" / "inner.py").write_text("import no_such_package_here.part\n")
    classes = {"Abootcamp": "good", "Bbootcamp": "missing", "Cbootcamp": "package", "Dbootcamp": "broken"}
    assert module_faults(str(tmp_path), classes) == {
        "Bbootcamp": "its module missing is not in the checkout",
        "Cbootcamp": "the package no_such_package_here is not installed",
        "Dbootcamp": "its module is not Python (SyntaxError)",
    }
