import random
import socket

import pytest
import yaml

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.plan import Model, engine_command, environment_yaml, plan_engines
from atroposlib.launch.services import free_ports

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


class NoSession:
    """Probes are made, not asked."""


def nodes(monkeypatch, nodelist: str, infer_tp: str) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    for name, value in (("SLURM_JOB_NODELIST", nodelist), ("INFER_TP", infer_tp), ("NUM_TRAINING_NODES", "1")):
        monkeypatch.setenv(name, value)


def test_on_several_nodes_the_engines_run_where_environments_look_for_them(monkeypatch):
    nodes(monkeypatch, "gpu[1-3]", "4")
    engine = {"kind": "sglang", "model": "org/model", "tp": 4}
    plan = plan_engines(config(engine=engine), NoSession())
    assert plan.urls == [f"http://gpu{node}:{port}" for node in (2, 3) for port in (9000, 9001)]
    assert [service.name for service in plan.services][:2] == ["sglang-gpu2-9000", "sglang-gpu2-9001"]
    second = list(plan.services[1].command)
    assert second[0] == "srun"
    assert "--nodelist=gpu2" in second
    assert second[second.index("--port") + 1] == "9001"
    assert second[second.index("--base-gpu-id") + 1] == "4"
    assert plan.services[1].log.name == "sglang-gpu2-9001.log"


def test_a_router_stands_in_front_of_all_engines(monkeypatch):
    nodes(monkeypatch, "gpu[1-3]", "8")
    engine = {"kind": "sglang", "model": "org/model", "tp": 8, "router": True, "port": 9900}
    plan = plan_engines(config(engine=engine), NoSession())
    assert plan.urls == ["http://127.0.0.1:9900"]
    assert [service.name for service in plan.services] == ["sglang-gpu2-9000", "sglang-gpu3-9000", "router"]
    assert list(plan.services[-1].command)[-3:] == ["--worker-urls", "http://gpu2:9000", "http://gpu3:9000"]


def test_on_one_node_the_engine_runs_here(monkeypatch):
    nodes(monkeypatch, "gpu1", "8")
    plan = plan_engines(config(engine={"kind": "sglang", "model": "m", "port": 9000}), NoSession())
    assert plan.urls == ["http://127.0.0.1:9000"]
    assert [(service.name, service.log.name) for service in plan.services] == [("engine", "sglang.log")]


def test_members_of_a_shared_run_write_apart_and_lease_together():
    written = settings(share={"member": "task3", "problems_per_lease": 5, "timeout_s": 9})["env"]
    assert written["rollouts_dir"] == "/r/members/task3/rollouts"
    leases = {key: value for key, value in written.items() if key.startswith("lease_")}
    assert leases == {"lease_dir": "/r/leases", "lease_owner": "task3", "lease_items": 5, "lease_timeout": 9.0}
    assert not [key for key in settings()["env"] if key.startswith("lease_")]


def test_a_free_port_leaves_room_for_the_second_port_of_sglang():
    ports = free_ports(200)
    assert len(set(ports)) == 200
    assert max(ports) + 10_000 <= 65_535


@pytest.mark.parametrize(
    ("outgoing", "lowest", "highest"),
    [
        ("32768\t60999\n", 10_000, 22_767),
        ("1024 65535", 10_000, 55_535),
        ("20001 60999", 10_000, 55_535),
        ("", 10_000, 39_151),
    ],
)
def test_a_free_port_is_none_that_an_outgoing_connection_may_get(tmp_path, monkeypatch, outgoing, lowest, highest):
    facts = tmp_path / "ip_local_port_range"
    facts.write_text(outgoing)
    monkeypatch.setattr("atroposlib.launch.services._OUTGOING", facts)
    random.seed(1)  # as runs do
    first = free_ports(100)
    random.seed(1)
    assert lowest <= min(first) <= max(first) <= highest
    assert free_ports(100) != first


def test_a_port_in_use_is_not_free(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number = taken.getsockname()[1]
        drawn = iter([number, number, 10_123, 10_124])
        monkeypatch.setattr("atroposlib.launch.services.SystemRandom.randrange", lambda *_: next(drawn))
        assert free_ports(1)[0] in (10_123, 10_124)
