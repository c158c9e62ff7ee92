"""The command line of an environment: where settings come from, what is refused, what is shown."""

import errno
import resource
import subprocess
import sys

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, EvalHandlingEnum, ServerBaseline
from atroposlib.envs.cli import help_text, main, resolve
from atroposlib.errors import ConfigError
from atroposlib.utils.cli import (
    adjust_model_defaults,
    extract_namespace,
    get_double_dash_flags,
    get_prefixed_pydantic_model,
    merge_dicts,
    parse_value,
    split_flags,
)


class ToyConfig(BaseEnvConfig):
    names: list[str] = Field(default=["a"])
    options: dict[str, float] = Field(default={"x": 1.0, "y": 2.0})
    path: str | None = "p"


class ToyEnv(BaseEnv):
    name = "toy"
    env_config_cls = ToyConfig

    @classmethod
    def config_init(cls):
        server = APIServerConfig(model_name="m0", base_url="http://localhost:9001/v1", api_key="secret")
        return ToyConfig(group_size=8, use_wandb=False), server


class TwoServerEnv(ToyEnv):
    @classmethod
    def config_init(cls):
        return ToyConfig(), [APIServerConfig(model_name="a"), APIServerConfig(model_name="b")]


def settings(*arguments, env_cls=ToyEnv, mode="serve"):
    return resolve(env_cls, mode, list(arguments))


def config_file(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return ["--config", str(path)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ByPrompt(Strict):
    prompt: str = ""


class ByCode(Strict):
    code: str = ""


class Renamed(Strict):
    by_code: ByCode = Field(ByCode(), alias="by")


class AuthorsConfig(BaseEnvConfig):
    judge: ByPrompt | ByCode | None = None
    tools: Renamed | None = None
    is_sound: bool = True

    @model_validator(mode="after")
    def check(self):
        if not self.is_sound:
            raise PydanticCustomError("unsound", "nothing here is sound")
        return self


class AuthorsEnv(ToyEnv):
    env_config_cls = AuthorsConfig

    @classmethod
    def config_init(cls):
        return AuthorsConfig(use_wandb=False), APIServerConfig(model_name="m0")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{judge: {promt: x}}", r"unknown key 'env\.judge\.ByPrompt\.promt'"),
        ("{tools: {by: {cod: x}}}", r"unknown key 'env\.tools\.by\.cod'"),
        ("{tools: {bye: {}}}", r"unknown key 'env\.tools\.bye'"),
        ("{is_sound: false}", "^env: nothing here is sound$"),
    ],
)
def test_mistakes_in_settings_of_any_shape_are_sentences(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        settings(*config_file(tmp_path, f"env: {text}\n"), env_cls=AuthorsEnv)


def test_flags_win_over_yaml_and_yaml_over_config_init(tmp_path):
    config = config_file(tmp_path, "env: {group_size: 5, total_steps: 7}\nopenai: {model_name: m1}\nslurm: true\n")
    result = settings(*config, "--env.total_steps", "9", "--openai.timeout", "30")
    assert (result.env.group_size, result.env.total_steps, result.env.use_wandb) == (5, 9, False)
    [server] = result.servers
    assert (server.model_name, server.base_url, server.timeout) == ("m1", "http://localhost:9001/v1", 30)
    assert result.manager.slurm is True


VALUES = {
    "a negative number": (["--env.max_num_workers", "-1"], "max_num_workers", -1),
    "with an equals sign": (["--env.max_num_workers=-1"], "max_num_workers", -1),
    "a word among numbers": (["--env.max_num_workers", "auto"], "max_num_workers", "auto"),
    "None": (["--env.path", "None"], "path", None),
    "null": (["--env.min_batch_allocation", "null"], "min_batch_allocation", None),
    "text that looks like a number": (["--env.run_name", "007"], "run_name", "007"),
    "text that looks like a switch": (["--env.run_name", "true"], "run_name", "true"),
    "a number in scientific notation": (["--env.accept_score", "1e-3"], "accept_score", 1e-3),
    "a switch with a value": (["--env.use_wandb", "true"], "use_wandb", True),
    "a bare switch": (["--env.use_wandb"], "use_wandb", True),
    "several values": (["--env.names", "x", "y"], "names", ["x", "y"]),
    "one value of a list": (["--env.names", "x"], "names", ["x"]),
    "a list as JSON": (["--env.names", '["x", "y"]'], "names", ["x", "y"]),
    "a repeated flag": (["--env.names", "x", "--env.names", "y"], "names", ["x", "y"]),
    "a dict replaces the default": (["--env.options", '{"x": 5}'], "options", {"x": 5.0}),
    "an enum": (["--env.eval_handling", "NONE"], "eval_handling", EvalHandlingEnum.NONE),
}


@pytest.mark.parametrize(("arguments", "field", "expected"), VALUES.values(), ids=VALUES)
def test_values_of_flags(arguments, field, expected):
    assert getattr(settings(*arguments).env, field) == expected


REFUSED = {
    "an unknown flag": (
        ["--env.group_sizes", "8"],
        "unknown flag --env.group_sizes; did you mean 'env.group_size'?",
    ),
    "dashes for a dot": (["--env--group_size", "8"], "did you mean 'env.group_size'"),
    "a word for a number": (["--env.group_size", "eight"], "--env.group_size is 'eight', which is not int"),
    "no value": (["--env.group_size"], "--env.group_size needs a value"),
    "two values for one": (["--env.group_size", "8", "9"], "it takes one"),
    "something without a flag": (["group_size=8"], "unexpected argument 'group_size=8'"),
    "an unknown word": (["--env.eval_handling", "SOMETIMES"], "STOP_TRAIN or LIMIT_TRAIN or NONE"),
    "a missing config file": (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_flags_are_refused_in_one_sentence(arguments, message):
    with pytest.raises(ConfigError) as error:
        settings(*arguments)
    assert message in str(error.value)


BAD_YAML = {
    "an unknown setting": ("env: {group_siz: 8}", "unknown setting in env: 'group_siz'; did you mean 'group_size'?"),
    "an unknown section": ("envs: {}", "did you mean 'env'?"),
    "a wrong type": ("env: {group_size: many}", "env.group_size is 'many'"),
    "no mapping": ("- 1", "holds list, expected env:, openai: and the like"),
    "no YAML": ("env: [", "is not YAML"),
    "a list for env": ("env: [group_size]", "it must hold settings"),
    "a list of settings for env": ("env: [{group_size: 8}]", "env: in the YAML file is a list; it must hold settings"),
    "a name that YAML reads as true": ("on: true", "unknown key in the YAML file 'True'"),
    "a number for a name": ("env: {1: x}", "unknown setting in env: '1'"),
}


@pytest.mark.parametrize(("text", "message"), BAD_YAML.values(), ids=BAD_YAML)
def test_wrong_yaml_is_refused_in_one_sentence(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        settings(*config_file(tmp_path, text))
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "env:\nopenai:\n", "openai: {weight: 1.0}\ntinker: {lora_rank: 32}\n"])
def test_empty_and_old_yaml_files_are_fine(tmp_path, text):
    assert settings(*config_file(tmp_path, text)).env.group_size == 8


def test_several_servers_in_yaml_take_overrides(tmp_path):
    config = config_file(tmp_path, "openai: [{base_url: 'http://a/v1'}, {base_url: 'http://b/v1'}]")
    result = settings(*config, "--openai.model_name", "m9")
    assert [(server.base_url, server.model_name) for server in result.servers] == [
        ("http://a/v1", "m9"),
        ("http://b/v1", "m9"),
    ]


def test_several_servers_of_config_init_stay():
    assert [server.model_name for server in settings(env_cls=TwoServerEnv).servers] == ["a", "b"]


def test_a_server_baseline_is_discovered_until_an_address_is_given():
    class DiscoveringEnv(ToyEnv):
        @classmethod
        def config_init(cls):
            return ToyConfig(), ServerBaseline(model_name="m")

    assert type(settings(env_cls=DiscoveringEnv).servers) is ServerBaseline
    [server] = settings("--openai.base_url", "http://a/v1", env_cls=DiscoveringEnv).servers
    assert (server.base_url, server.model_name) == ("http://a/v1", "m")


def test_process_has_defaults_of_its_own_that_flags_override():
    config = settings(mode="process").env
    assert (config.ensure_scores_are_not_same, config.include_messages) == (False, True)
    assert config.data_path_to_save_groups == "data/toy.jsonl"
    assert settings("--env.include_messages", "false", mode="process").env.include_messages is False


@pytest.mark.parametrize("given", [["--env.total_groups", "60"], "env: {total_groups: 60}"], ids=["flag", "file"])
def test_a_number_of_groups_for_serve_is_no_number_for_process(tmp_path, given):
    arguments = config_file(tmp_path, given) if isinstance(given, str) else given
    with pytest.raises(ConfigError, match=r"env.total_groups is 60, and process .* 1000; give --env.total_steps 60"):
        settings(*arguments, mode="process")
    assert settings(*arguments).env.total_groups == 60
    assert settings(*arguments, "--env.total_steps", "60", mode="process").env.total_steps == 60


WITHOUT_EFFECT = {
    "of serve": ("process", "inference_weight 2", "process serves no trainer: --env.inference_weight"),
    "of groups": ("evaluate", "total_steps 2", "evaluate records no groups: --env.total_steps"),
    "of leases": ("serve", "lease_items 2", "env.lease_dir is not set: --env.lease_items"),
    "of the journal": ("process", "response_seed 2", "env.response_journal is off: --env.response_seed"),
    "of shards": ("process", "compress_rollouts true", "all groups go to one file: --env.compress_rollouts"),
}


@pytest.mark.parametrize(("mode", "given", "said"), WITHOUT_EFFECT.values(), ids=WITHOUT_EFFECT)
def test_a_flag_that_a_mode_does_not_use_is_named(mode, given, said):
    assert settings("--env." + given.split()[0], given.split()[1], mode=mode).without_effect() == [
        f"without effect, as {said}"
    ]


def test_flags_that_are_used_are_not_named():
    given = ["--env.rollouts_dir", "r", "--env.compress_rollouts", "true", "--env.max_batches_offpolicy", "2"]
    assert settings(*given).without_effect() == []


def test_the_name_of_the_environment_names_the_wandb_run():
    assert settings().env.wandb_name == "toy"


def test_the_shown_settings_hold_no_secret_and_can_be_read_again(tmp_path):
    text = settings("--env.group_size", "3", "--openai.base_url", "http://me:secret@host:9001/v1").as_yaml()
    assert "secret" not in text
    again = settings(*config_file(tmp_path, text))
    assert again.env.group_size == 3
    assert yaml.safe_load(again.as_yaml()) == yaml.safe_load(text)


def test_help_shows_every_setting_with_its_meaning_and_no_secret():
    text = help_text(ToyEnv, "process")
    for field in ToyConfig.model_fields:
        assert f"--env.{field} " in text
    for field in APIServerConfig.model_fields:
        assert f"--openai.{field} " in text
    assert "Sequences per group: how often each item is rolled out. (default: 8)" in text
    assert "secret" not in text
    assert all(info.description for info in BaseEnvConfig.model_fields.values())


EXITS = {
    "help": (["--help"], 0),
    "help of a command": (["serve", "--help"], 0),
    "an unknown command": (["sevre"], 2),
    "a wrong flag": (["process", "--env.nope", "1"], 2),
}


@pytest.mark.parametrize(("arguments", "code"), EXITS.values(), ids=EXITS)
def test_exit_codes(arguments, code, capsys):
    assert main(ToyEnv, arguments) == code
    captured = capsys.readouterr()
    assert captured.out if code == 0 else captured.err.count("\n") == 1


def test_an_overridden_command_class_is_used(capsys):
    class OwnCommand(get_prefixed_pydantic_model(ToyConfig, "env.")):
        def run(self):
            print(getattr(self, "env.group_size"))

    class OwnEnv(ToyEnv):
        @classmethod
        def get_cli_serve_config_cls(cls):
            return OwnCommand

    assert main(OwnEnv, ["serve", "--env.group_size", "6"]) == 0
    assert capsys.readouterr().out == "6\n"


def test_flags_of_this_process_are_read_without_types(monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["env.py", "serve", "--env.x", "-1", "--y=a b", "--z", "--n", "None", "--l", "1", "2"]
    )
    assert get_double_dash_flags() == {"env.x": "-1", "y": "a b", "z": True, "n": None, "l": ["1", "2"]}


def test_nested_dicts_are_merged_and_later_ones_win():
    assert merge_dicts({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "b": 2}) == {"a": {"x": 1, "y": 3}, "b": 2}


def test_a_namespace_is_cut_out_of_a_dict_or_a_model():
    class Flat(BaseModel):
        one: int = 1

    assert extract_namespace({"env.a": 1, "other.a": 2}, "env.") == {"a": 1}
    assert extract_namespace(Flat(), "on") == {"e": 1}


def test_defaults_of_a_model_can_be_changed():
    changed = adjust_model_defaults(ToyConfig, ToyConfig(group_size=3, path=None))
    assert changed.__name__ == "ToyConfigWithDefaults"
    assert (changed().group_size, changed().path) == (3, None)
    assert changed.model_fields["group_size"].description == ToyConfig.model_fields["group_size"].description


def test_a_flag_without_any_value_is_an_empty_list_of_texts():
    assert split_flags(["--a", "--b", "1"]) == ({"a": [], "b": ["1"]}, [])


def test_a_literal_choice_is_listed_when_wrong():
    with pytest.raises(ConfigError, match="which is not int or auto"):
        parse_value(["many"], BaseEnvConfig.model_fields["max_num_workers"].annotation, flag="env.max_num_workers")


def test_text_that_would_be_a_mapping_or_a_list_stays_text_where_text_is_meant():
    assert parse_value(["answer: 4"], str, flag="env.x") == "answer: 4"
    assert parse_value(["[think] first"], str | None, flag="env.x") == "[think] first"
    assert parse_value(["{a: 1}"], str | dict[str, int], flag="env.x") == {"a": 1}


def test_a_yaml_file_in_another_encoding_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"env: {path: caf\xe9}")
    with pytest.raises(ConfigError, match="is not YAML: 'utf-8' codec"):
        settings("--config", str(path))


def test_a_file_that_the_user_may_not_use_is_a_sentence_with_its_owner(capsys):
    class RefusedCommand(get_prefixed_pydantic_model(ToyConfig, "env.")):
        def run(self):
            raise PermissionError(errno.EACCES, "Permission denied", "/etc/a.jsonl.index")

    class RefusedEnv(ToyEnv):
        @classmethod
        def get_cli_process_config_cls(cls):
            return RefusedCommand

    assert main(RefusedEnv, ["process"]) == 1
    assert "error: /etc/a.jsonl.index: Permission denied; /etc belongs to root, and this is" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["atroposlib.cli.run_api", "atroposlib.environments.countdown_env"])
def test_too_few_descriptors_to_work_with_are_a_sentence(tmp_path, command):
    words = ["process"] if "environments" in command else ["--port", "0", "--state-dir", str(tmp_path / "state")]
    limited = f'ulimit -n 12; exec "$0" -m {command} "$@"'
    done = subprocess.run(["bash", "-c", limited, sys.executable, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("no more than 12 files and connections may be open")) == (1, 1), done
    assert "Traceback" not in done.stderr


def test_a_limit_of_the_system_that_ends_a_run_is_a_sentence(monkeypatch, capsys):
    def no_more_files(settings):
        raise OSError(errno.EMFILE, "Too many open files", ".env.config.yaml.x")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(ToyEnv, "from_settings", no_more_files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert main(ToyEnv, ["process", "--testing"]) == 1
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert most > 256  # as many as the system allows
    assert f"error: no more than {most} files and connections may be open" in capsys.readouterr().err
