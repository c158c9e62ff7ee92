import yaml

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.engine_plan import engine_command
from atroposlib.launch.model_checks import Model
from atroposlib.launch.plan import environment_yaml

MODEL = Model("m", "/models/m", "/models/m/tokenizer", "/models/m/tokenizer")


def config(**changes) -> DatagenConfig:
    values = {"name": "t", "run_dir": "/r", "problems": 5, "responses": 3, "environment": {"script": "env.py"}}
    return DatagenConfig.model_validate({**values, **changes})


def settings(**changes) -> dict:
    return yaml.safe_load(environment_yaml(config(**changes), MODEL, ["http://e:1"], "http://a:2"))


def test_the_environments_file_holds_only_settings_that_exist():
    written = settings()
    assert set(written["env"]) <= set(BaseEnvConfig.model_fields)
    assert set(written["openai"][0]) <= set(APIServerConfig.model_fields)


def test_the_run_decides_sizes_and_addresses_and_the_user_the_rest():
    environment = {
        "script": "env.py",
        "env": {"group_size": 99, "seed": 4, "use_wandb": True},
        "server": {"timeout": 7},
    }
    written = settings(environment=environment)
    assert (written["env"]["group_size"], written["env"]["total_groups"]) == (3, 5)
    assert (written["env"]["seed"], written["env"]["use_wandb"]) == (4, True)
    assert written["env"]["rollout_server_url"] == "http://a:2"
    assert written["openai"][0]["base_url"] == "http://e:1/v1"
    assert written["openai"][0]["timeout"] == 7


def test_sglang_is_started_with_its_sizes_and_further_flags():
    engine = {"kind": "sglang", "model": "org/model", "tp": 4, "dp": 2, "args": ["--trust-remote-code"], "tune": False}
    command = engine_command(config(engine=engine), 9000)
    assert command[1:5] == ["-m", "sglang.launch_server", "--model-path", "org/model"]
    assert command[command.index("--tp") + 1] == "4"
    assert command[command.index("--dp") + 1] == "2"
    assert command[-1] == "--trust-remote-code"


def test_sglang_on_one_gpu_gets_graphs_for_all_sequences_in_flight_and_no_text_that_nobody_reads():
    engine = {"kind": "sglang", "model": "org/model", "ids_only": True, "args": ["--log-level-http=info"]}
    environment = {"script": "env.py", "workers": 40}
    command = engine_command(config(engine=engine, environment=environment, responses=16), 9000)
    assert command[command.index("--cuda-graph-max-bs") + 1] == "1024"
    assert "--skip-tokenizer-init" in command
    assert "--log-level-http" not in command
