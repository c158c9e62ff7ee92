from pathlib import Path

import pytest

from atroposlib.errors import ConfigError, PathError
from atroposlib.launch.config import load_config

GOOD = """
name: t
run_dir: "{run_dir}"
problems: 4
responses: 2
environment: {{script: env.py}}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def good(tmp_path: Path, run_dir: str = "out", extra: str = "") -> Path:
    return write(tmp_path, GOOD.format(run_dir=run_dir) + extra)


def test_script_is_found_beside_the_yaml_and_run_dir_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    config = load_config(good(tmp_path))
    assert config.environment.script == str(tmp_path / "env.py")
    assert config.run_dir == str(tmp_path.parent / "out")


@pytest.mark.parametrize("spelling", ["~/out", "$HOME/out", "${HOME}/out"])
def test_home_in_run_dir_is_expanded(tmp_path, monkeypatch, spelling):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(good(tmp_path, spelling)).run_dir == str(tmp_path / "out")


def test_an_unset_variable_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(PathError, match=r"run_dir.*'NOT_SET' is not set"):
        load_config(good(tmp_path, "$NOT_SET/out"))


BAD = {
    "an unknown key with its nearest name": ("responsse: 3", "unknown key 'responsse'; did you mean 'responses'?"),
    "an unknown key inside a section": ("engine: {slot: 3}", "'engine.slot'; did you mean 'slots'?"),
    "an unknown key inside a list": ("export: [{fromat: messages}]", "'export.0.fromat'; did you mean 'format'?"),
    "a wrong type": ("engine: {slots: many}", "engine.slots is 'many'"),
    "a number below 1": ("engine: {slots: 0}", "engine.slots is 0"),
    "an engine port that no machine has": ("engine: {port: 65536}", "engine.port is 65536"),
    "an API port that no machine has": ("api: {port: 99999}", "api.port is 99999"),
    "a value outside the choices": ("engine: {kind: gpu}", "engine.kind is 'gpu'"),
    "an adapter that is no name": ("environment: {adapter: [1]}", "environment.adapter is [1]"),
    "an adapter's settings without keys": ("environment: {adapter: gymnasium, id: x, env: 5}", "environment.env is 5"),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_a_bad_line_is_named_with_what_was_found(tmp_path, line, message):
    with pytest.raises(ConfigError) as caught:
        load_config(good(tmp_path, extra=line))
    assert message in str(caught.value)


def test_a_missing_key_is_named(tmp_path):
    with pytest.raises(ConfigError, match="'environment' is missing"):
        load_config(write(tmp_path, "name: t\nrun_dir: o\nproblems: 1\nresponses: 1\n"))


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "just words"])
def test_what_is_not_a_mapping_is_refused_in_one_sentence(tmp_path, text):
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_config(write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_overrides_replace_the_files_values(tmp_path):
    config = load_config(good(tmp_path), problems=9, run_dir=None)
    assert (config.problems, Path(config.run_dir).name) == (9, "out")


def test_values_are_set_from_the_command_line_section_by_section(tmp_path):
    changes = ["engine.tp=4", "engine.args=[--a, b]", "share.member=x", "engine.tp=8", "environment.env.seed=3"]
    config = load_config(good(tmp_path), changes)
    assert (config.engine.tp, config.engine.args, config.share.member) == (8, ["--a", "b"], "x")
    assert config.environment.env == {"seed": 3}
    assert config.work_dir == Path(config.run_dir, "members", "x")


@pytest.mark.parametrize("change", ["engine.tp", "=4", "name.x=4", "engine.tpp=4", "engine.args=["])
def test_a_change_that_names_nothing_is_refused(tmp_path, change):
    with pytest.raises(ConfigError):
        load_config(good(tmp_path), [change])


def test_the_environments_own_file_lies_below_what_the_run_says(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "env: {seed: 1, few_shot: 2, max_num_workers: 9}\nopenai: [{timeout: 5, api_key: k}]\nslurm: false\n"
    )
    changes = ["environment.config=own.yaml", "environment.env.seed=3", "environment.server.timeout=9"]
    config = load_config(good(tmp_path), changes)
    assert config.environment.env == {"seed": 3, "few_shot": 2}
    assert config.environment.server == {"timeout": 9, "api_key": "k"}


@pytest.mark.parametrize("text", ["env: [1]", "env: words", "openai: words", "openai: [words]"])
def test_an_environments_own_file_without_keys_is_refused(tmp_path, text):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"own\.yaml: (env|openai) holds .*, expected keys and values"):
        load_config(good(tmp_path), ["environment.config=own.yaml"])


def test_every_path_is_expanded_wherever_it_stands(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELS", "/models")
    monkeypatch.setenv("HOME", "/home/me")
    changes = [
        "engine.model=$MODELS/r1",
        "engine.tokenizer=~/tokenizer",
        "engine.args=[--download-dir, ~/cache, --json, '{\"a\": 1}']",
        "log_dir=$HOME/logs",
        "environment.env.internbootcamp_path=~/bootcamp",
        "export=[{path: $HOME/sft.jsonl}]",
    ]
    config = load_config(good(tmp_path), changes)
    assert (config.engine.model, config.engine.tokenizer) == ("/models/r1", "/home/me/tokenizer")
    assert config.engine.args == ["--download-dir", "/home/me/cache", "--json", '{"a": 1}']
    assert (config.log_dir, config.export[0].path) == ("/home/me/logs", "/home/me/sft.jsonl")
    assert config.environment.env["internbootcamp_path"] == "/home/me/bootcamp"


@pytest.mark.parametrize(
    "change",
    ["engine.model=$NO/r1", "log_dir=${NO}/x", "environment.env.data_dir=$NO", "export=[{path: ~no_such_user/x}]"],
)
def test_a_path_that_cannot_be_expanded_is_named(tmp_path, monkeypatch, change):
    monkeypatch.delenv("NO", raising=False)
    with pytest.raises(PathError, match=change.split("=")[0].split(".")[-1]):
        load_config(good(tmp_path), [change])
