"""A flag has its effect whatever the YAML file says: every flag of every command that reads one."""

import importlib
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click
import pytest
import typer
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from atroposlib.cli.main import COMMANDS
from atroposlib.data.policy import TargetStep, load_policy
from atroposlib.environments.intern_bootcamp.intern_bootcamp_env import InternBootcampEnv
from atroposlib.envs.cli import MODES, Mode, main, namespaces, resolve
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.example_trainer.config import _DECIDED, RunConfig, TrainingConfig
from atroposlib.example_trainer.recipe import build, parser_of
from atroposlib.example_trainer.run_plan import environment_settings, trainer_settings
from atroposlib.launch.config import DatagenConfig, load_config
from atroposlib.launch.plan import Model, environment_flags, environment_yaml
from atroposlib.rollouts.locations import RunFiles

VALUES = [
    *("http://one:1", "http://two:2", "7", "one", "two"),
    *(False, True, 3, 5, 0, 1, 0.25, 0.75, 2000, 3000, 9000, 9001),
    *({"a": 1.0}, {"b": 2.0}, ["a"], ["b", "c"], [{"id": "a"}], [{"id": "b"}]),
    *([1], [2, 3]),
]


def two_values(info: FieldInfo) -> tuple[Any, Any]:
    """Two different values that the field takes as they are, None apart."""
    if id(info) not in _FOUND:
        _FOUND[id(info)] = _two_values(info)
    return _FOUND[id(info)]


_FOUND: dict[int, tuple[Any, Any]] = {}  # by the address of a model's field, which lives as long as the model


def _two_values(info: FieldInfo) -> tuple[Any, Any]:
    exact = TypeAdapter(Annotated[info.annotation, info])
    found: list[Any] = []
    for value in _choices(info.annotation) or VALUES:
        try:
            exact.validate_python(value, strict=value in VALUES)
        except ValidationError:
            continue
        found.append(value)
    first, second, *_ = found
    return first, second


def _choices(annotation: Any) -> list[Any]:
    """The words of an Enum or a Literal, unless other types are taken, too."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is Literal:
        return list(parts)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [member.value for member in annotation]
    return _choices(parts[0]) if len(parts) == 1 else []


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda each: each.value if isinstance(each, Enum) else dict(each)))


# -- serve, process, evaluate ----------------------------------------------------------------------------------------

ENV_MODELS = namespaces(InternBootcampEnv, "serve", InternBootcampEnv.env_config_cls)
ENV_FIELDS = [(space, name) for space, model in ENV_MODELS.items() for name in model.model_fields]


def whole_yaml(tmp_path: Path) -> Path:
    """A file that says something of every setting that can be said along with the others."""
    said = {
        space: {name: two_values(info)[0] for name, info in model.model_fields.items() if name != "task_weights"}
        for space, model in ENV_MODELS.items()
    }
    manager = said.pop("")
    path = tmp_path / "all.yaml"
    path.write_text(json.dumps({**said, **manager}))
    return path


@pytest.mark.parametrize(("space", "name"), ENV_FIELDS)
def test_a_flag_of_an_environment_beats_a_yaml_file_that_sets_everything(tmp_path, space, name):
    value = two_values(ENV_MODELS[space].model_fields[name])[1]
    assert resolved("serve", whole_yaml(tmp_path), space, name, value) == plain(value)


IN_MODES = [(mode, *field) for mode in MODES for field in ENV_FIELDS if (mode, field[1]) != ("process", "total_groups")]
"""Of `total_groups`, `process` says that it is not its own."""


@pytest.mark.parametrize(("mode", "space", "name"), IN_MODES)
def test_a_flag_of_an_environment_beats_the_same_setting_in_every_mode(tmp_path, mode, space, name):
    said, value = two_values(ENV_MODELS[space].model_fields[name])
    (tmp_path / "one.yaml").write_text(json.dumps({space: {name: said}} if space else {name: said}))
    assert resolved(mode, tmp_path / "one.yaml", space, name, value) == plain(value)


def resolved(mode: Mode, config: Path, space: str, name: str, value: Any) -> Any:
    """What the setting is when the command line says `value`."""
    flag = f"{space}.{name}" if space else name
    words = [f"--{flag}", *(map(as_text, value) if isinstance(value, list) else [as_text(value)])]
    settings = resolve(InternBootcampEnv, mode, ["--config", str(config), *words])
    server = settings.servers[0]  # pyright: ignore[reportIndexIssue]
    return plain(getattr({"env": settings.env, "openai": server, "": settings.manager}[space], name))


FILES = {
    "a file beats a folder": ("rollouts_dir: d", ["--env.data_path_to_save_groups", "f.jsonl"], "f.jsonl"),
    "a folder beats a file": ("data_path_to_save_groups: f.jsonl", ["--env.rollouts_dir", "d"], "d/"),
    "none at all beats a folder": ("rollouts_dir: d", ["--env.dump_rollouts", "false"], None),
}


@pytest.mark.parametrize(("text", "words", "expected"), FILES.values(), ids=FILES)
def test_rollouts_go_where_the_flag_says(tmp_path, monkeypatch, text, words, expected):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(f"env: {{{text}, tokenizer_name: smollm2-135m}}\ntesting: true\n")
    settings = resolve(InternBootcampEnv, "serve", ["--config", "c.yaml", *words])
    monkeypatch.setattr(InternBootcampEnv, "load_tokenizer", lambda self: None)
    env = InternBootcampEnv.from_settings(settings)
    files = RunFiles.of(env.config, env.label, must_write=env.process_mode)
    where = files and (files.single or files.folder)
    assert where == (None if expected is None else Path(expected) if files is None else where)
    assert expected is None or Path(str(where)).name == expected.strip("/")


DERIVED = {
    "steps": ("total_groups: 9", ["--env.total_steps", "2"], ("total_groups", None)),
    "workers of a server": ("max_num_workers: 64", ["--env.max_num_workers_per_node", "2"], ("max_num_workers", -1)),
    "one task": ("task_weights: {sorting: 1}", ["--env.task_name", "addition"], ("task_weights", None)),
    "a mixture": ("task_name: addition", ["--env.task_weights", "{sorting: 1}"], ("task_name", "RandomTask")),
    "another mixture": (
        "task_weights: {sorting: 1, capitals: 2}\n  task_params: {capitals: {longest: 3}}".replace("\n ", ","),
        ["--env.task_weights", "{sorting: 3}"],
        ("task_weights", {"sorting": 3.0}),
    ),
}


@pytest.mark.parametrize(("text", "words", "expected"), DERIVED.values(), ids=DERIVED)
def test_what_excludes_a_flag_gives_way_to_it(tmp_path, text, words, expected):
    (tmp_path / "c.yaml").write_text(f"env: {{{text}}}\n")
    settings = resolve(InternBootcampEnv, "serve", ["--config", str(tmp_path / "c.yaml"), *words])
    assert getattr(settings.env, expected[0]) == expected[1]


def test_an_address_given_as_a_flag_is_the_only_one(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("openai: [{base_url: 'http://a/v1', model_name: m}, {base_url: 'http://b/v1'}]\nslurm: true\n")
    settings = resolve(InternBootcampEnv, "serve", ["--config", str(path), "--openai.base_url", "http://c/v1"])
    [server] = settings.servers  # pyright: ignore[reportGeneralTypeIssues]
    assert (server.base_url, server.model_name, settings.manager.slurm) == ("http://c/v1", "m", False)


# -- datagen ---------------------------------------------------------------------------------------------------------


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every setting of datagen by its dotted name."""
    found: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        kind = info.annotation
        inner = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        found |= leaves(inner, f"{prefix}{name}.") if inner else {f"{prefix}{name}": info}
    return found


DATAGEN = leaves(DatagenConfig)
PATHS = {"run_dir", "log_dir", "links", "environment.script", "environment.config"}
OWN_VALUES = {"export": [{"path": "a.jsonl"}], "environment.config": "own.yaml"}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        inner = root
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return root


@pytest.mark.parametrize("key", DATAGEN)
def test_a_datagen_setting_beats_a_yaml_file_that_sets_everything(tmp_path, key):
    (tmp_path / "own.yaml").write_text("env: {}\n")
    said = {name: OWN_VALUES.get(name) or two_values(info)[0] for name, info in DATAGEN.items()}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(nested(said)))
    value = OWN_VALUES.get(key) or two_values(DATAGEN[key])[1]
    result: Any = load_config(tmp_path / "run.yaml", [f"{key}={as_text(value)}"])
    for part in key.split("."):
        result = getattr(result, part)
    if key in PATHS:
        assert Path(result).name == Path(value).name
    elif key == "export":
        assert result[0].path == "a.jsonl"
    elif key == "environment.env":
        assert result == {**value, **said["environment.flags"]}
    else:
        assert plain(result) == plain(value)


@pytest.mark.parametrize("name", InternBootcampEnv.env_config_cls.model_fields)
def test_an_environments_setting_reaches_it_from_datagen_or_is_refused(tmp_path, name):
    (tmp_path / "own.yaml").write_text(whole_yaml(tmp_path).read_text())
    base = "name: t\nrun_dir: r\nproblems: 4\nresponses: 2\nenvironment: {script: e.py, config: own.yaml}\n"
    (tmp_path / "run.yaml").write_text(base)
    value = two_values(InternBootcampEnv.env_config_cls.model_fields[name])[1]
    try:
        config = load_config(tmp_path / "run.yaml", [f"environment.env.{name}={as_text(value)}"])
    except ConfigError as refusal:
        if "would have no effect: the run decides it; set" not in str(refusal):
            raise
        return
    (tmp_path / "environment.yaml").write_text(
        environment_yaml(config, Model("m", "m", "m", "m"), ["http://e"], "http://a")
    )
    words = ["--config", str(tmp_path / "environment.yaml"), *environment_flags(config)]
    found = getattr(resolve(InternBootcampEnv, "serve", words).env, name)
    assert Path(found).name == Path(value).name if name.endswith("_path") else plain(found) == plain(value)


def test_the_number_of_workers_given_to_datagen_beats_the_environments_own(tmp_path):
    text = "name: t\nrun_dir: r\nproblems: 4\nresponses: 2\n"
    (tmp_path / "run.yaml").write_text(f"{text}environment: {{script: e.py, env: {{max_num_workers: auto}}}}\n")
    config = load_config(tmp_path / "run.yaml", ["environment.workers=3"])
    written = yaml.safe_load(environment_yaml(config, Model("m", "m", "m", "m"), ["http://e"], "http://a"))
    assert written["env"]["max_num_workers"] == 3


# -- grpo, grpo-run --------------------------------------------------------------------------------------------------

NEEDED = {"model_name": "m", "run_dir": "r", "environment": "e.py"}
TRAINER_FIELDS = [(model, name) for model in (TrainingConfig, RunConfig) for name in model.model_fields]


@pytest.mark.parametrize(("model", "name"), TRAINER_FIELDS, ids=lambda each: getattr(each, "__name__", each))
def test_a_flag_of_the_trainer_beats_its_recipe(tmp_path, model, name):
    info = model.model_fields[name]
    first, second = two_values(info)
    needed = {key: value for key, value in NEEDED.items() if key in model.model_fields}
    said = {**needed, name: first}
    if name == "datasets":
        del said["datasets"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(said))
    flag = f"--{name.replace('_', '-')}"
    shown = (
        [as_text(value) for value in second] if isinstance(second, list) and name != "datasets" else [as_text(second)]
    )
    words = [flag if second is True else f"--no-{flag[2:]}"] if isinstance(second, bool) else [flag, *shown]
    flags = vars(parser_of(model, "", "").parse_args(["--config", str(recipe), *words]))
    try:
        config = build(model, flags, {})
    except ConfigError:  # it makes no sense without another setting
        assert model.with_flags(said, {name: second})[name] == second
        return
    assert plain(getattr(config, name)) == plain(second if name != "datasets" else config.datasets)


def run_of(tmp_path: Path, recipe: dict[str, Any], *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the environment and of the trainer."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model_name": "m", "run_dir": "r", "batch_size": 16, **recipe}))
    config = build(RunConfig, vars(parser_of(RunConfig, "", "").parse_args(["--config", str(path), *words])), {})
    return environment_settings(config, tmp_path, ["http://e"], "a")["env"], trainer_settings(config, tmp_path, [], "a")


def test_a_temperature_given_to_the_run_is_the_environments_and_the_trainers(tmp_path):
    recipe = {"environment": "e.py", "environment_config": {"temperature": 0.6, "seed": 4}}
    environment, trainer = run_of(tmp_path, recipe, "--temperature", "0.9", "--seed", "5")
    assert (environment["temperature"], trainer["temperature"], environment["seed"]) == (0.9, 0.9, 4)


def test_problem_sets_given_to_the_run_beat_the_recipes_script_and_the_other_way_round(tmp_path):
    recipe = {"environment": "e.py", "environment_config": {"reward": "math"}}
    environment, _ = run_of(tmp_path, recipe, "--datasets", '[{"id": "d"}]', "--reward", "answer_tag")
    assert (environment["datasets"][0]["id"], environment["reward"]) == ("d", "answer_tag")
    environment, _ = run_of(tmp_path, {"datasets": [{"id": "d"}]}, "--environment", "e.py")
    assert "datasets" not in environment


def test_an_engines_address_given_to_the_run_means_that_engine(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name: m\nrun_dir: r\nenvironment: e.py\nengine: sglang\n")
    flags = parser_of(RunConfig, "", "").parse_args(["--config", str(path), "--engine-urls", "http://e"])
    config = build(RunConfig, vars(flags), {})
    assert (config.engine, config.engine_urls) == ("external", ["http://e"])


@pytest.mark.parametrize("name", _DECIDED)
def test_what_the_run_decides_cannot_be_given_to_its_environment(tmp_path, name):
    with pytest.raises(ConfigError, match=f"--environment-config {name} would have no effect: .*; give --"):
        run_of(tmp_path, {"environment": "e.py"}, "--environment-config", json.dumps({name: 1}))


# -- datasets --------------------------------------------------------------------------------------------------------


def test_number_and_seed_given_as_flags_beat_those_of_the_policy(tmp_path):
    (tmp_path / "p.yaml").write_text("seed: 1\nsteps: [{step: score, above: 0}, {step: target, count: 50}]\n")
    policy = load_policy(tmp_path / "p.yaml", seed=2, target=7)
    assert policy.seed == 2
    assert [step.step for step in policy.steps] == ["score", "target"]
    assert isinstance(policy.steps[1], TargetStep)
    assert policy.steps[1].count == 7


# -- all the others --------------------------------------------------------------------------------------------------

READ_YAML = {"datagen", "train", "grpo", "sft", "dpo", "data"}
YAML_OPTIONS = {"--config", "--policy"}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - READ_YAML))
def test_no_other_command_reads_a_yaml_file(name):
    module = importlib.import_module(COMMANDS[name].module)
    app = getattr(module, "app", None)
    text = Path(str(module.__file__)).read_text()
    commands = _commands(typer.main.get_command(app)) if isinstance(app, typer.Typer) else []
    options = {option for command in commands for each in command.params for option in each.opts}
    assert not options & YAML_OPTIONS
    assert not any(f'"{option}"' in text for option in YAML_OPTIONS)


def _commands(command: click.Command) -> list[click.Command]:
    return [command, *(each for sub in getattr(command, "commands", {}).values() for each in _commands(sub))]


def test_an_environments_refusal_of_a_flag_is_a_usage_error(capsys):
    assert main(InternBootcampEnv, ["serve", "--env.task_weights", "{}"]) == 2
    assert "task_weights is empty" in capsys.readouterr().err
    assert issubclass(ConfigError, AtroposError)
