import importlib
import math
import sys
from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from atroposlib.example_trainer import TrainingConfig, config_from_args, parse_args, run
from atroposlib.example_trainer.recipe import build, check

ROOT = Path(__file__).parents[2]


def from_flags(*flags):
    return config_from_args(parse_args(["--model-name", "m", *flags]))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("MAXENT", "VLLM_MODEL", "VLLM_PORT", "VLLM_TP_SIZE", "VLLM_MAX_LEN", "VLLM_MEM_UTIL"):
        monkeypatch.delenv(name, raising=False)


def recipe(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_flags_override_the_recipe_and_the_recipe_the_defaults(tmp_path):
    path = recipe(tmp_path, "model_name: m\nlr: 1.0e-4\nbatch_size: 16\n")
    config = config_from_args(parse_args(["--config", path, "--lr", "2e-6"]))
    assert (config.lr, config.batch_size, config.seq_len) == (2e-6, 16, 2048)


def test_a_recipe_of_maxent_grpo_steers_beta_and_tau_as_there(tmp_path):
    path = recipe(tmp_path, "model_name: m\nkl_control: step\nkl_ctl_step_size: 0.1\nmaxent_tau_warmup_steps: 3\n")
    config = config_from_args(parse_args(["--config", path]))
    assert (config.kl_control, config.kl_ctl_step_size, config.maxent_tau_warmup_steps) == ("step", 0.1, 3)


def test_an_unknown_key_names_the_nearest_one(tmp_path):
    path = recipe(tmp_path, "model_name: m\nbatchsize: 16\n")
    with pytest.raises(ConfigError, match="unknown key 'batchsize'; did you mean 'batch_size'"):
        config_from_args(parse_args(["--config", path]))


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "trainer").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_of_a_whole_run_is_called_so(path):
    with pytest.raises(ConfigError, match=r"recipe of atropos-grpo-run.* it has .*run_dir.*atropos-grpo-run --config"):
        config_from_args(parse_args(["--config", str(path)]))


@pytest.mark.parametrize("parse", [parse_args, run.main])
def test_help_ends_with_examples(parse, capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    examples = capsys.readouterr().out.partition("\nexamples:\n")[2]
    assert [line for line in examples.splitlines() if "--config" in line]


def test_an_unknown_flag_names_the_nearest_one():
    with pytest.raises(ConfigError, match="unknown flag '--clip-epsilon'; did you mean '--clip-eps'"):
        parse_args(["--clip-epsilon", "0.3"])


def test_a_flag_of_upstream_that_is_gone_says_what_to_do():
    with pytest.raises(ConfigError, match="--world-size is gone: start several processes with accelerate launch"):
        parse_args(["--world-size", "2"])


def test_upstreams_name_for_the_sync_interval_is_kept():
    assert from_flags("--vllm-restart-interval", "3").sync_interval == 3


def test_a_recipe_cannot_name_another_recipe(tmp_path):
    with pytest.raises(ConfigError, match="unknown key 'config'"):
        config_from_args(parse_args(["--config", recipe(tmp_path, "model_name: m\nconfig: other.yaml\n")]))


def test_a_missing_model_is_named():
    with pytest.raises(ConfigError, match="model_name is missing; give --model-name"):
        config_from_args(parse_args([]))


def test_the_env_mapping_is_exported(tmp_path, monkeypatch):
    monkeypatch.delenv("SOME_VARIABLE", raising=False)
    config_from_args(parse_args(["--config", recipe(tmp_path, "model_name: m\nenv:\n  SOME_VARIABLE: 3\n")]))
    import os

    assert os.environ.pop("SOME_VARIABLE") == "3"


def test_vllm_variables_are_honoured():
    environ = {
        "VLLM_MODEL": "v",
        "VLLM_PORT": "9100",
        "VLLM_TP_SIZE": "2",
        "VLLM_MAX_LEN": "8192",
        "VLLM_MEM_UTIL": "0.6",
    }
    config = build(TrainingConfig, {}, environ)
    assert (config.model_name, config.vllm_port, config.vllm_tp_size) == ("v", 9100, 2)
    assert (config.max_model_len, config.gpu_memory_utilization) == (8192, 0.6)


def test_maxent_variable_chooses_the_objective_unless_a_flag_does():
    assert build(TrainingConfig, {"model_name": "m"}, {"MAXENT": "1"}).objective == "maxent"
    assert build(TrainingConfig, {"model_name": "m", "objective": "dapo"}, {"MAXENT": "1"}).objective == "dapo"


@pytest.mark.parametrize(("mode", "kind"), [("none", "none"), ("lora_only", "vllm_lora")])
def test_upstreams_bridge_modes_have_a_meaning(mode, kind):
    assert from_flags("--weight-bridge-mode", mode, "--use-lora").weight_sync == kind


def test_the_bridge_mode_that_is_gone_says_what_to_use():
    with pytest.raises(ConfigError, match="use --weight-sync vllm"):
        from_flags("--weight-bridge-mode", "shared_vllm")


def test_switches_and_lists_on_the_command_line():
    config = from_flags("--no-save-final", "--use-lora", "--lora-target-modules", "q_proj", "o_proj")
    assert (config.save_final, config.use_lora, config.lora_target_modules) == (False, True, ["q_proj", "o_proj"])


COMMANDS = {
    "grpo": ["--model-name", "m"],
    "run": ["--model-name", "m", "--run-dir", "{folder}/run", "--environment", "e.py", "--batch-size", "16"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_without_the_trainers_packages_says_how_to_install_them_and_starts_nothing(
    tmp_path, monkeypatch, capsys, name
):
    monkeypatch.setitem(sys.modules, "torch", None)
    main = importlib.import_module(f"atroposlib.example_trainer.{name}").main
    with pytest.raises(SystemExit, match="2"):
        main([flag.format(folder=tmp_path) for flag in COMMANDS[name]])
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install -e '.[trainer]'" in said
    assert not list(tmp_path.iterdir())


def test_upstreams_clip_eps_sets_both_bounds():
    preset = from_flags("--clip-eps", "0.1").preset
    assert (preset.eps_low, preset.eps_high) == (0.1, 0.1)
    assert from_flags("--objective", "dapo").preset.eps_high == 0.28


def test_infinite_tau_can_be_written(tmp_path):
    path = recipe(tmp_path, "model_name: m\nobjective: xdr_grpo\nmaxent_tau: .inf\n")
    assert math.isinf(config_from_args(parse_args(["--config", path])).maxent_tau)


REFUSED = {
    "two corrections of one gap": ({"mismatch": "tis"}, "set old_logprobs to 'trainer'"),
    "restart without a command": ({"weight_sync": "restart"}, "engine_command is empty"),
    "an adapter swap without an adapter": ({"weight_sync": "vllm_lora"}, "use_lora is false"),
    "GPU memory for a restart": (
        {"weight_sync": "restart", "engine_command": ["x"], "sync_from": "gpu"},
        "set sync_from to 'disk'",
    ),
    "GPU memory of an adapter": ({"weight_sync": "vllm", "use_lora": True, "sync_from": "gpu"}, "without an adapter"),
    "responses longer than sequences": ({"max_completion_length": 9999}, "raise the one or lower the other"),
    "a word that is no number": ({"lr": "fast"}, "lr is 'fast'"),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_with_advice(values, message):
    with pytest.raises(ConfigError, match=message):
        check(TrainingConfig, {"model_name": "m", **values})


def test_one_step_takes_batch_size_times_accumulation():
    assert from_flags("--batch-size", "4", "--gradient-accumulation-steps", "8").step_sequences == 32


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    shown = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in shown for name in TrainingConfig.model_fields)
