import json
import os
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.config import RunConfig, TrainingConfig
from atroposlib.example_trainer.exports import (
    CURRENT,
    CURRENT_ADAPTER,
    CURRENT_GGUF,
    FOLDERS,
    GGUF_FILES,
    first_link,
    keep_newest,
    newest_flags,
    replace_link,
)
from atroposlib.example_trainer.recipe import build, check, read_recipe
from atroposlib.example_trainer.run import main
from atroposlib.example_trainer.run_plan import (
    TRAINER_GRACE_S,
    engine_command,
    engine_services,
    environment_settings,
    make_plan,
    trainer_launcher,
    trainer_settings,
)

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "trainer").glob("*.yaml"))


def make_run(**changes):
    values = {"model_name": "m", "run_dir": "r", "environment": "e.py", "batch_size": 16}
    return check(RunConfig, values | changes)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid(path):
    config = build(RunConfig, {"config": str(path)}, {})
    assert config.step_sequences % config.num_generations == 0


def test_the_trainers_recipe_is_one_that_the_trainer_reads(tmp_path):
    config = make_run(environment_config={"temperature": 0.7}, lr=3e-6)
    settings = trainer_settings(config, tmp_path, ["http://e"], "http://a")
    trainer = check(TrainingConfig, yaml.safe_load(yaml.safe_dump(settings)))
    assert (trainer.lr, trainer.temperature, trainer.weight_sync) == (3e-6, 0.7, "embedded")
    assert (trainer.engine_urls, trainer.atropos_url) == (["http://e"], "http://a")
    assert trainer.save_path == str(tmp_path / "checkpoints")


def test_the_trainer_gets_one_process_for_each_of_its_gpus():
    assert trainer_launcher({"ATROPOS_TRAINER_GPUS": "1,2,3"})[-3:] == ["--num_processes", "3", "-m"]
    assert trainer_launcher({"ATROPOS_TRAINER_GPUS": "1"}) == trainer_launcher({}) == [sys.executable, "-m"]


async def test_the_launcher_of_several_processes_leaves_them_the_trainers_grace(tiny_model, tmp_path, monkeypatch):
    from torch.distributed.launcher.api import LaunchConfig

    config = make_run(model_name=str(tiny_model), environment=str(Path(__file__)))
    async with aiohttp.ClientSession() as session:
        trainer = make_plan(config, tmp_path, session).trainer
    for name, value in trainer.env.items():
        monkeypatch.setenv(name, value)
    launcher = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2)
    if not hasattr(launcher, "shutdown_timeout"):
        pytest.skip("this torch always waits 30 s")
    assert 60 < launcher.shutdown_timeout < TRAINER_GRACE_S


SYNCS = {("sglang", False): "sglang", ("vllm", False): "vllm", ("vllm", True): "vllm_lora", ("external", False): "none"}


@pytest.mark.parametrize(("engine", "lora"), SYNCS)
def test_the_engine_decides_how_weights_travel(tmp_path, engine, lora):
    config = make_run(engine=engine, use_lora=lora, engine_urls=["http://e"])
    assert trainer_settings(config, tmp_path, ["http://e"], "a")["weight_sync"] == SYNCS[engine, lora]


def test_the_environment_gets_what_the_run_decides_and_the_users_fields(tmp_path):
    config = make_run(num_generations=16, environment_config={"task_name": "x", "group_size": 3})
    settings = environment_settings(config, tmp_path, ["http://e/v1", "http://f"], "http://a")
    env, servers = settings["env"], settings["openai"]
    assert (env["task_name"], env["group_size"], env["rollout_server_url"]) == ("x", 16, "http://a")
    assert [server["base_url"] for server in servers] == ["http://e/v1", "http://f/v1"]
    assert env["ensure_scores_are_not_same"] is False


def test_an_environment_whose_batches_may_be_dropped_does_not_stop_before_the_trainer(tmp_path):
    steps = [
        environment_settings(make_run(training_steps=5, max_staleness=limit), tmp_path, ["http://e"], "a")["env"]
        for limit in (None, 2)
    ]
    assert [env["total_steps"] for env in steps] == [5, sys.maxsize]


def test_dapo_asks_the_environment_for_groups_with_a_signal(tmp_path):
    config = make_run(objective="dapo")
    assert environment_settings(config, tmp_path, ["http://e"], "a")["env"]["ensure_scores_are_not_same"] is True


def test_vllm_sizes_come_from_its_environment_variables(tmp_path):
    environ = {"VLLM_MODEL": "big", "VLLM_TP_SIZE": "4", "VLLM_MEM_UTIL": "0.8"}
    flags = {"run_dir": "r", "environment": "e.py", "batch_size": 16, "engine": "vllm"}
    command = engine_command(build(RunConfig, flags, environ), 9001)
    assert command[command.index("--model") + 1] == "big"
    assert command[command.index("--tensor-parallel-size") + 1] == "4"
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.8"


def test_vllm_is_asked_for_logprobs_after_temperature_under_the_models_name():
    command = engine_command(make_run(engine="vllm"), 9001, "/somewhere/current")
    assert command[command.index("--model") + 1] == "/somewhere/current"
    assert command[command.index("--served-model-name") + 1] == "m"
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"


@pytest.mark.parametrize("source", ["disk", "gpu"])
def test_vllm_takes_pickles_only_where_weights_come_from_gpu_memory(tiny_model, tmp_path, source):
    config = make_run(model_name=str(tiny_model), engine="vllm", sync_from=source)
    (engine,) = engine_services(config, 9001, tmp_path, tmp_path, None)
    assert ('{"backend": "ipc"}' in engine.command) == (source == "gpu")
    assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in engine.env) == (source == "gpu")


RANKS = {1: "1", 4: "8", 16: "16", 48: "64"}


@pytest.mark.parametrize("rank", RANKS)
def test_an_adapters_rank_is_rounded_up_to_one_that_vllm_knows(rank):
    command = engine_command(make_run(engine="vllm", use_lora=True, lora_r=rank), 9001)
    assert command[command.index("--max-lora-rank") + 1] == RANKS[rank]


@pytest.mark.parametrize(("engine", "flag"), [("vllm", "--model"), ("sglang", "--model-path")])
async def test_an_engine_starts_from_the_newest_weights_of_the_run(tiny_model, tmp_path, engine, flag):
    config = make_run(model_name=str(tiny_model), environment=str(Path(__file__)), engine=engine)
    async with aiohttp.ClientSession() as session:
        command = make_plan(config, tmp_path, session).servers[0].command
        served = Path(command[command.index(flag) + 1])
        assert served.resolve() == tiny_model.resolve()

        pushed = tmp_path / "checkpoints" / "engine" / "weights_00000001"
        pushed.mkdir()
        replace_link(served, pushed)
        assert make_plan(config, tmp_path, session).servers[0].command[:5] == command[:5]
    assert served.resolve() == pushed.resolve()


def started_by(weight_sync, exports):
    """Arguments of a program that `exports` becomes."""
    program = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", "own"]
    starter = [sys.executable, "-m", "atroposlib.example_trainer.exports", weight_sync, str(exports), *program]
    return json.loads(subprocess.run(starter, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def test_an_engine_that_is_started_again_gets_the_adapter_that_was_pushed_last(tmp_path):
    assert started_by("vllm_lora", tmp_path) == ["own"]
    (tmp_path / "adapter_00000012").mkdir()
    replace_link(tmp_path / CURRENT_ADAPTER, tmp_path / "adapter_00000012")
    assert started_by("vllm_lora", tmp_path) == ["own", "--lora-modules", f"policy={tmp_path}/current_adapter"]


def test_an_engine_that_can_be_told_is_started_with_the_version_of_its_weights(tmp_path):
    assert newest_flags("embedded", tmp_path) == newest_flags("sglang", tmp_path) == []
    (tmp_path / "weights_00000012.gguf").touch()
    (tmp_path / "weights_00000013").mkdir()
    replace_link(tmp_path / CURRENT_GGUF, tmp_path / "weights_00000012.gguf")
    replace_link(tmp_path / CURRENT, tmp_path / "weights_00000013")
    weights = str((tmp_path / "weights_00000012.gguf").resolve())
    assert newest_flags("embedded", tmp_path) == ["--weights", weights, "--weight-version", "12"]
    assert newest_flags("sglang", tmp_path) == ["--weight-version", "13"]
    assert newest_flags("vllm", tmp_path) == []


def test_a_model_folder_that_is_called_like_an_export_has_no_version(tmp_path):
    (tmp_path / "weights_00000012").mkdir()
    assert newest_flags("sglang", first_link(tmp_path / "engine", tmp_path / "weights_00000012").parent) == []


async def test_the_trainer_is_ready_when_vllm_serves_what_the_environment_asks_for(tiny_model, tmp_path):
    models = [{"id": "base"}]

    async def listed(_request):
        return web.json_response({"data": models})

    app = web.Application()
    app.router.add_get("/v1/models", listed)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        urls = [str(server.make_url("/v1"))]
        config = make_run(
            model_name=str(tiny_model), environment=str(Path(__file__)), engine="vllm", use_lora=True, engine_urls=urls
        )
        plan = make_plan(config, tmp_path, session)
        (asked,) = yaml.safe_load((tmp_path / "environment.yaml").read_text())["openai"]
        assert not await plan.trainer.ready(7)
        models.append({"id": asked["model_name"]})
        assert await plan.trainer.ready(7)
        await server.close()
        assert not await plan.trainer.ready(7)


async def test_the_trainer_follows_the_runs_flags_and_not_the_variables_that_they_overruled(
    tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setenv("MAXENT", "1")
    monkeypatch.setenv("VLLM_MODEL", "other")
    flags = {"run_dir": "r", "environment": str(Path(__file__)), "batch_size": 16}
    config = build(RunConfig, flags | {"model_name": str(tiny_model), "objective": "xdr_grpo"}, os.environ)
    async with aiohttp.ClientSession() as session:
        service = make_plan(config, tmp_path, session).trainer
    trainer = build(TrainingConfig, {"config": service.command[-1]}, {**os.environ, **service.env})
    assert (trainer.objective, trainer.model_name) == ("xdr_grpo", str(tiny_model))


async def test_an_environment_that_hangs_is_noticed_by_the_file_it_is_told_to_write(tiny_model, tmp_path):
    own = {"progress_path": "elsewhere.json"}  # not the user's to decide: the run reads it
    config = make_run(model_name=str(tiny_model), environment=str(Path(__file__)), environment_config=own, hang_s=60)
    async with aiohttp.ClientSession() as session:
        service = make_plan(config, tmp_path, session).environment
    progress = Path(yaml.safe_load(Path(service.command[-1]).read_text())["env"]["progress_path"])
    assert not await service.ready(7)
    progress.write_text(json.dumps({"pid": 7, "state": "running", "updated_at": time.time(), "groups_done": 5}))
    assert await service.ready(7)
    assert await service.healthy(7)
    assert service.achieved() == 5
    progress.write_text(json.dumps({"pid": 7, "state": "running"}))
    os.utime(progress, (time.time() - 90,) * 2)
    assert not await service.healthy(7)


REFUSED = {
    "nothing to train on": ({"environment": None}, "give either environment"),
    "two things to train on": ({"datasets": [{"id": "d.jsonl"}]}, "give either environment"),
    "groups that do not fill a step": ({"num_generations": 7}, "not a multiple of num_generations 7"),
    "a port that does not exist": ({"engine_port": 99_999}, r"engine_port is 99999: .* less than or equal to 65535"),
    "a port that SGLang cannot add 10,000 to": ({"engine": "sglang", "engine_port": 60_000}, "give one up to 55535"),
    "an external engine nowhere": ({"engine": "external"}, "engine_urls is empty"),
    "a source with an unknown key": (
        {"environment": None, "datasets": [{"id": "d", "wieght": 1}]},
        r"unknown key 'wieght'|datasets",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_before_anything_starts(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_run(**changes)


def test_wrong_usage_ends_with_2_and_one_sentence(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--lerning-rate", "1"])
    assert capsys.readouterr().err.startswith("atropos-grpo-run: unknown flag '--lerning-rate'")


def test_a_limit_of_the_system_that_ends_a_run_is_a_sentence(tmp_path, monkeypatch, capsys):
    def full(config):
        raise OSError(28, "No space left on device", str(tmp_path / "run.json"))

    monkeypatch.setattr("atroposlib.example_trainer.run.run", full)
    with pytest.raises(SystemExit, match="1"):
        main(["--model-name", "m", "--environment", "e.py", "--run-dir", str(tmp_path)])
    said = f"atropos-grpo-run: no room on the disk at {tmp_path}/run.json (No space left on device); free some space"
    assert capsys.readouterr().err.startswith(said)


def test_an_environment_that_is_not_there_is_named_before_anything_starts(tmp_path, capsys):
    flags = ["--model-name", "m", "--environment", "no_such_env.py", "--run-dir", str(tmp_path)]
    with pytest.raises(SystemExit, match="2"):
        main([*flags, "--engine", "external", "--engine-urls", "http://127.0.0.1:9"])
    assert "no_such_env.py does not exist" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"datasets": [{"id": "hub/name"}, {"id": "no_such.jsonl"}]}, "data set .*/no_such.jsonl does not exist"),
        ({"datasets": [{"id": "hub/name"}], "chat_template": "no_such.jinja"}, "chat_template .*/no_such.jinja does"),
    ],
)
async def test_files_of_problems_that_are_not_there_are_named_before_anything_starts(tmp_path, fields, missing):
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ConfigError, match=missing):
            make_plan(make_run(environment=None, **fields), tmp_path, session)
    assert not list(tmp_path.iterdir())


def test_a_recipe_that_is_no_mapping_is_refused(tmp_path):
    (tmp_path / "r.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="holds list, expected config fields"):
        read_recipe(tmp_path / "r.yaml")


def test_files_named_in_a_recipe_lie_beside_it_or_in_the_current_folder(tmp_path, monkeypatch):
    recipes, here = tmp_path / "recipes", tmp_path / "here"
    for folder, name in ((recipes, "both.py"), (here, "both.py"), (here, "only_here.py"), (recipes, "problems.jsonl")):
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
    monkeypatch.chdir(here)

    def read(**content):
        (recipes / "r.yaml").write_text(yaml.safe_dump(content))
        return read_recipe(recipes / "r.yaml")

    assert read(environment="both.py") == {"environment": str(recipes / "both.py")}
    assert read(environment="only_here.py") == {"environment": "only_here.py"}
    assert read(datasets=[{"id": "problems.jsonl"}, {"id": "hub/name"}]) == {
        "datasets": [{"id": str(recipes / "problems.jsonl")}, {"id": "hub/name"}]
    }


def test_the_slurm_script_has_its_directives_before_any_command():
    lines = (ROOT / "slurm" / "train.slurm").read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(i < first_command for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert subprocess.run(["bash", "-n", str(ROOT / "slurm" / "train.slurm")]).returncode == 0


@pytest.mark.parametrize("suffix", ["", ".gguf"], ids=["folders", "files"])
def test_weights_that_are_served_stay_when_the_clock_was_set_back(tmp_path, suffix):
    for version, written_at in enumerate((1000, 2000, 3000, 500)):
        export = tmp_path / f"weights_{version:08d}{suffix}"
        export.touch() if suffix else export.mkdir()
        os.utime(export, (written_at, written_at))
    replace_link(tmp_path / CURRENT, tmp_path / f"weights_00000003{suffix}")
    keep_newest(tmp_path, GGUF_FILES if suffix else FOLDERS)
    assert sorted(path.name[:16] for path in tmp_path.glob("weights_*")) == ["weights_00000002", "weights_00000003"]
