import json
import socket

import pytest

from atroposlib.errors import LaunchError
from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.preflight import SETTINGS_FILE, data_settings, preflight

EXTERNAL = {"kind": "external", "model": "m", "base_url": "http://127.0.0.1:1/v1"}


def config(tmp_path, **changes) -> DatagenConfig:
    (tmp_path / "env.py").touch()
    values = {
        "name": "t",
        "run_dir": str(tmp_path / "run"),
        "problems": 4,
        "responses": 2,
        "engine": EXTERNAL,
        "environment": {"script": str(tmp_path / "env.py")},
    }
    return DatagenConfig.model_validate({**values, **changes})


def complaint(settings: DatagenConfig) -> str:
    with pytest.raises(LaunchError) as caught:
        preflight(settings)
    return str(caught.value)


def test_a_good_config_passes_and_names_the_model(tmp_path):
    assert preflight(config(tmp_path)).name == "m"


def test_a_missing_script_is_named(tmp_path):
    assert "gone.py does not exist" in complaint(config(tmp_path, environment={"script": str(tmp_path / "gone.py")}))


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"api.port {port} cannot be used" in complaint(config(tmp_path, api={"port": port}))


def test_a_run_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written" in complaint(config(tmp_path, run_dir=str(tmp_path / "file")))


def test_too_little_disk_is_said_with_both_figures(tmp_path):
    message = complaint(config(tmp_path, problems=10**9, responses=10**6, expected_tokens=10**6))
    assert "GB free, but 1000000000 x 1000000 responses" in message


def test_an_external_engine_needs_an_address(tmp_path):
    assert "engine.base_url is not set" in complaint(config(tmp_path, engine={"kind": "external", "model": "m"}))


def test_a_missing_engine_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'atroposlib[sglang]'" in complaint(config(tmp_path, engine={"kind": "sglang", "model": "m"}))


def test_answers_longer_than_the_engines_context_are_refused(tmp_path):
    environment = {"script": str(tmp_path / "env.py"), "env": {"max_token_length": 512}}
    message = complaint(config(tmp_path, engine={"kind": "embedded", "context": 512}, environment=environment))
    assert "max_token_length is 512 and max_prompt_tokens is 1, together more than the context of 512" in message


def test_every_problem_is_reported_at_once(tmp_path):
    message = complaint(config(tmp_path, engine={"kind": "external"}, environment={"script": "gone.py"}))
    assert "gone.py" in message
    assert "base_url" in message


def test_a_run_folder_is_not_continued_with_other_settings(tmp_path):
    first = config(tmp_path)
    preflight(first)
    (tmp_path / "run" / SETTINGS_FILE).write_text(json.dumps(data_settings(first)))
    preflight(config(tmp_path, problems=40))  # more problems are a continuation
    assert "responses was 2 when run_dir" in complaint(config(tmp_path, responses=3))
