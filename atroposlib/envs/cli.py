"""The command line of every environment: `python env.py serve|process|evaluate --config x.yaml --env.group_size 8`.

Settings come from flags, else the YAML file, else `config_init`. They are resolved here, in one function for all three
commands; unknown names are refused with the nearest known one.
"""

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, Self, TextIO, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from atroposlib import calm_log
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.constants import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.envs.server_handling.openai_server import resolve_openai_configs
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.server_config import without_login
from atroposlib.envs.server_handling.server_manager import ServerManager, ServerManagerConfig
from atroposlib.errors import AtroposError, ConfigError, ModelError
from atroposlib.paths import expand_path, read_mapping, remedy
from atroposlib.rollouts.run import RunOutcome
from atroposlib.rollouts.stop import EXIT_WORK_REMAINS, leave_soon
from atroposlib.system_limits import raise_descriptor_limit, told_limits
from atroposlib.type_definitions import Json, JsonObject
from atroposlib.utils.cli import (
    describe_fields,
    extract_namespace,
    merge_dicts,
    mistakes,
    parse_value,
    refuse_unknown,
    split_flags,
)

logger = logging.getLogger(__name__)

Mode = Literal["serve", "process", "evaluate"]
MODES: dict[Mode, str] = {
    "serve": "roll out groups for a trainer, through the trajectory API",
    "process": "write groups to a file; needs no trajectory API",
    "evaluate": "measure the model and write the results",
}
EXIT_FAILED = 1
SECRET_FIELDS = frozenset({"api_key"})
Model = TypeVar("Model", bound=BaseModel)
_SERVING = (
    *("rollout_server_url", "max_batches_offpolicy", "inference_weight", "min_batch_allocation"),
    *("steps_per_eval", "eval_handling", "eval_limit_ratio"),
)
_RECORDING = (
    *("total_steps", "total_groups", "data_path_to_save_groups", "dump_rollouts", "rollouts_dir"),
    *("stop_after_accepted", "hopeless_rate", "total_accepted", "token_budget", "lease_dir"),
)
_CHECKS = {"--check", "--check=settings"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything one command was told, resolved."""

    mode: Mode
    env: BaseEnvConfig
    servers: ServerBaseline | Sequence[APIServerConfig]
    manager: ServerManagerConfig
    fresh: bool
    yaml_config: JsonObject
    flags: JsonObject  # those really given, typed: {"env.group_size": 8}

    def summary(self, name: str) -> list[str]:
        """Return what a start says: the work, the engine, and what differs from the defaults. The rest is in a file."""
        servers = [self.servers] if isinstance(self.servers, ServerBaseline) else list(self.servers)
        engines = ", ".join(getattr(server, "base_url", None) or "found in the job" for server in servers[:3])
        more = f" and {len(servers) - 3} more" if len(servers) > 3 else ""
        given = {key: value for key, value in self.flags.items() if key.rpartition(".")[2] not in SECRET_FIELDS}
        changed = ", ".join(f"--{key} {value}" for key, value in given.items()) or "no flags"
        api = f", trajectory API {self.env.rollout_server_url}" if self.mode == "serve" else ""
        model = servers[0].model_name if servers else "none"
        lines = [
            f"{name} {self.mode}: groups of {self.env.group_size}, tokenizer {self.env.tokenizer_name}{api}",
            f"engine: {engines}{more}, model {model}",
            f"given: {changed}; every setting is kept next to the rollouts (.config.yaml)",
        ]
        return [without_login(line) for line in lines]

    def without_effect(self) -> list[str]:
        """Return a sentence for each reason for which flags that were given change nothing."""
        env, is_one_file = self.env, self.env.rollouts_dir is None and self.env.data_path_to_save_groups
        reasons = {
            f"{self.mode} serves no trainer": () if self.mode == "serve" else _SERVING,
            "evaluate records no groups": _RECORDING if self.mode == "evaluate" else (),
            "env.lease_dir is not set": () if env.lease_dir else ("lease_owner", "lease_items", "lease_timeout"),
            "env.response_journal is off": ("response_seed", "reuse_rollouts") if env.response_journal == "off" else (),
            "all groups go to one file": ("groups_per_shard", "compress_rollouts") if is_one_file else (),
        }
        flags = {
            reason: [f"env.{key}" for key in keys if f"env.{key}" in self.flags] for reason, keys in reasons.items()
        }
        return [f"without effect, as {reason}: --{', --'.join(given)}" for reason, given in flags.items() if given]

    def as_yaml(self) -> str:
        """The settings as a file for `--config`, with secrets left out."""
        servers = [self.servers] if isinstance(self.servers, ServerBaseline) else list(self.servers)
        openai = [server.model_dump(mode="json", exclude=set(SECRET_FIELDS)) for server in servers]
        openai = [
            {**kept, "base_url": without_login(url)} if (url := kept.get("base_url")) else kept for kept in openai
        ]
        shown = {
            ENV_NAMESPACE: self.env.model_dump(mode="json"),
            OPENAI_NAMESPACE: openai[0] if len(openai) == 1 else openai,
            **self.manager.model_dump(mode="json"),
        }
        return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


class CliEnv(Protocol):
    """An environment as the command line needs it; `BaseEnv` is one."""

    name: str | None
    server_cls: ClassVar[type[APIServer]]
    fresh: bool
    settings_text: str | None

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerBaseline | Sequence[APIServerConfig]]: ...

    @classmethod
    def extra_namespaces(cls, mode: str) -> dict[str, type[BaseModel]]: ...

    @classmethod
    async def preview(cls, settings: Settings) -> list[str]: ...

    @classmethod
    def from_settings(cls, settings: Settings) -> Self: ...

    @classmethod
    def has_own_tokenizer(cls) -> bool: ...

    async def _run_evaluate(self) -> int: ...

    async def env_manager(self) -> RunOutcome: ...

    async def process_manager(self) -> RunOutcome: ...


class EnvCommand:
    """One command of one environment. Made by `make_command`, run by `main`."""

    env_cls: ClassVar[type[CliEnv]]
    mode: ClassVar[Mode]

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = arguments

    def check(self, *, settings_alone: bool = False) -> int:
        """Print what the environment says of its items, what its tokenizer is, and what its engines answer.

        Args:
            settings_alone: leave out tokenizer and engines, as they are not there yet.

        Raises:
            ConfigError: a setting is wrong, or an engine has another tokenizer.
            ModelError: there is no such tokenizer.
        """
        settings = resolve(self.env_cls, self.mode, self.arguments)
        for line in settings.without_effect():
            print(line)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            for line in runner.run(self.env_cls.preview(settings)):
                print(line)
            if not settings_alone:
                for line in runner.run(_counterparts(self.env_cls, settings)):
                    print(line)
                print(f"{self.env_cls.name or self.env_cls.__name__} {self.mode}: nothing found that would stop it")
        return 0

    def run(self) -> int:
        """Resolve the settings, run the environment; the exit code."""
        settings = resolve(self.env_cls, self.mode, self.arguments)
        text = settings.as_yaml()
        for line in settings.summary(self.env_cls.name or self.env_cls.__name__):
            logger.info("%s", line)
        for line in settings.without_effect():
            logger.warning("%s", line)
        env = self.env_cls.from_settings(settings)
        env.fresh, env.settings_text = settings.fresh, text
        return _run_loop(env, self.mode)


def make_command(env_cls: type[CliEnv], mode: Mode) -> type[EnvCommand]:
    """The command class of one environment and mode."""
    return type(f"{env_cls.__name__}{mode.capitalize()}", (EnvCommand,), {"env_cls": env_cls, "mode": mode})


def main(env_cls: type[CliEnv], arguments: Sequence[str] | None = None) -> int:
    """Run the command line of one environment.

    Returns:
        0 done, 1 failed (one sentence on stderr), 2 wrong usage, 75 stopped by a signal while work remains.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    mode = arguments[0] if arguments else "--help"
    _configure_logging()
    try:
        raise_descriptor_limit()  # a request is a connection, and 1,024 are the usual soft limit
        if mode in ("-h", "--help"):
            print("\n".join(["commands (each has --help):", *(f"  {mode:<10}{says}" for mode, says in MODES.items())]))
            return 0
        refuse_unknown([mode], MODES, what="command")
        command_cls = getattr(env_cls, f"get_cli_{mode}_config_cls")()
        if {"-h", "--help"} & set(arguments):
            print(help_text(env_cls, mode))  # pyright: ignore[reportArgumentType]
            return 0
        checks = [argument for argument in arguments if argument.partition("=")[0] == "--check"]
        given = [argument for argument in arguments[1:] if argument not in checks]
        if unknown := set(checks) - _CHECKS:
            raise ConfigError(f"{unknown.pop()} is no check; give --check or --check=settings")
        if issubclass(command_cls, EnvCommand):
            command = command_cls(given)
            with told_limits():
                return command.check(settings_alone="--check" not in checks) if checks else command.run()
        if checks:
            print(f"{env_cls.__name__} reads its command line itself: its settings are not checked", file=sys.stderr)
            return 0
        flags, _ = split_flags(given)
        return command_cls(**{name: texts[0] if texts else True for name, texts in flags.items()}).run() or 0
    except AtroposError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except PermissionError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}; {remedy(error)}", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:  # `... --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


async def _counterparts(env_cls: type[CliEnv], settings: Settings) -> list[str]:
    """Load the tokenizer as the environment would, and ask the engines; a line for each."""
    from atroposlib.envs.server_handling.token_server import load_for

    given, manager = settings.env.tokenizer_name, settings.manager
    servers = ServerManager(settings.servers, env_cls.server_cls, slurm=manager.slurm, testing=manager.testing)
    tokenizer, name = None, given
    if env_cls.has_own_tokenizer():
        line = f"tokenizer: made by {env_cls.__name__}.load_tokenizer, not looked at"
    else:
        try:
            tokenizer, name = load_for(given, [server.config for server in servers.servers])
            line = f"tokenizer {name}: {len(tokenizer)} ids"
        except ModelError:
            if given != BaseEnvConfig.model_fields["tokenizer_name"].default:
                raise
            line = "tokenizer: env.tokenizer_name is not set and no engine names one; a run takes that of its engine"
    return [line, *await servers.describe_engines(tokenizer, name)]


def resolve(env_cls: type[CliEnv], mode: Mode, arguments: Sequence[str]) -> Settings:
    """Return the settings of one command: flags over YAML over the mode's defaults over `config_init`.

    A mapping of the YAML file is merged into that of `config_init`; one given as a flag replaces both.

    Raises:
        ConfigError: an unknown name, a value of the wrong kind, or a YAML file that cannot be read.
    """
    default_env, default_servers = defaults_of(env_cls)
    texts, extra = split_flags(arguments)
    if extra:
        raise ConfigError(f"unexpected argument {extra[0]!r}; settings are given as --env.NAME VALUE")
    yaml_config = _load_yaml(texts.pop("config", None))
    fresh = bool(parse_value(texts.pop("fresh"), bool, flag="fresh")) if "fresh" in texts else False
    models = namespaces(env_cls, mode, type(default_env))
    flags = _typed_flags(texts, models)
    _check_yaml(yaml_config, models)
    below = merge_dicts(
        default_env.model_dump(), _mode_defaults(mode, env_cls, default_env), yaml_config.get(ENV_NAMESPACE) or {}
    )
    env_flags = extract_namespace(flags, f"{ENV_NAMESPACE}{NAMESPACE_SEP}")
    env = _validated(type(default_env), {**below, **default_env.reset_by(env_flags), **env_flags}, ENV_NAMESPACE)
    if mode == "process" and env.total_groups not in (None, env.total_steps):
        raise ConfigError(
            f"env.total_groups is {env.total_groups}, and process writes env.total_steps groups, which is "
            f"{env.total_steps}; give --env.total_steps {env.total_groups}, as total_groups is for serve"
        )
    if env.wandb_name is None:
        env.wandb_name = env_cls.name
    manager_fields = ServerManagerConfig.model_fields
    found_by = {"slurm": False, "testing": False} if f"{OPENAI_NAMESPACE}{NAMESPACE_SEP}base_url" in flags else {}
    manager = {key: value for key, value in {**yaml_config, **found_by, **flags}.items() if key in manager_fields}
    return Settings(
        mode=mode,
        env=env,
        servers=_servers(default_servers, yaml_config, flags),
        manager=_validated(ServerManagerConfig, manager, ""),
        fresh=fresh,
        yaml_config=yaml_config,
        flags=flags,
    )


def defaults_of(env_cls: type[CliEnv]) -> tuple[BaseEnvConfig, ServerBaseline | Sequence[APIServerConfig]]:
    """Return what `config_init` gives: the environment's settings and its servers.

    Raises:
        ConfigError: it gives something else, or is no class method.
    """
    wanted = (
        f"{env_cls.__name__}.config_init must be a @classmethod that returns (settings of the environment, servers)"
    )
    if inspect.isfunction(inspect.getattr_static(env_cls, "config_init")):
        raise ConfigError(f"{wanted}; @classmethod is missing")
    given: object = env_cls.config_init()
    match given:
        case [BaseModel(), _]:
            return given[0], given[1]  # pyright: ignore[reportReturnType]
    raise ConfigError(f"{wanted}; it returned {'None' if given is None else type(given).__name__}")


def namespaces(env_cls: type[CliEnv], mode: Mode, env_model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The groups of flags of one command by their prefix; "" holds those without one."""
    return {
        ENV_NAMESPACE: env_model,
        OPENAI_NAMESPACE: APIServerConfig,
        "": ServerManagerConfig,
        **env_cls.extra_namespaces(mode),
    }


def help_text(env_cls: type[CliEnv], mode: Mode) -> str:
    """Every setting of one command with its meaning and default."""
    default_env, servers = defaults_of(env_cls)
    server = servers if isinstance(servers, ServerBaseline) else next(iter(servers), ServerBaseline())
    defaults = {
        ENV_NAMESPACE: {**default_env.model_dump(), **_mode_defaults(mode, env_cls, default_env)},
        OPENAI_NAMESPACE: {k: "(set)" if k in SECRET_FIELDS and v else v for k, v in server.model_dump().items()},
    }
    parts = [
        f"{env_cls.__name__} {mode}: {MODES[mode]}\n{(env_cls.__doc__ or '').strip()}\n",
        "  --config FILE.yaml\n        Settings below env:, openai: and at the top level; flags win over it.",
        "  --fresh\n        Start a new run, keep an existing one and do not resume it.",
        "  --check\n        Start nothing: check the settings, show what would be asked, ask tokenizer and engines.\n"
        "        --check=settings leaves these two out.",
    ]
    for name, model in namespaces(env_cls, mode, type(default_env)).items():
        prefix = f"{name}{NAMESPACE_SEP}" if name else ""
        parts.append(describe_fields(model, prefix, defaults.get(name, {})))
    return "\n".join(parts)


def _load_yaml(texts: list[str] | None) -> JsonObject:
    if texts is None:
        return {}
    if len(texts) != 1:
        raise ConfigError("--config needs one file")
    path = expand_path(texts[0], what="--config")
    return read_mapping(path, expected="env:, openai: and the like", what="the settings", may_be_empty=True)


def _typed_flags(texts: Mapping[str, list[str]], models: Mapping[str, type[BaseModel]]) -> JsonObject:
    known = {
        f"{name}{NAMESPACE_SEP}{field}" if name else field: info.annotation
        for name, model in models.items()
        for field, info in model.model_fields.items()
    }
    refuse_unknown(texts, known, what="flag --")
    return {flag: parse_value(values, known[flag], flag=flag) for flag, values in texts.items()}


def _check_yaml(config: Mapping[str, object], models: Mapping[str, type[BaseModel]]) -> None:
    sections = [*(name for name in models if name), *models[""].model_fields, *_LEGACY[""]]
    refuse_unknown(map(str, config), sections, what="key in the YAML file")
    for name, model in models.items():
        section = config.get(name) if name else None
        if isinstance(section, list) and issubclass(model, BaseEnvConfig):
            raise ConfigError(
                f"{name}: in the YAML file is a list; it must hold settings, as `group_size: 8`, without `-`"
            )
        for entry in section if isinstance(section, list) else [section or {}]:
            if not isinstance(entry, Mapping):
                raise ConfigError(f"{name}: in the YAML file is {entry!r}; it must hold settings, as `group_size: 8`")
            if model.model_config.get("extra") != "allow":
                refuse_unknown(
                    map(str, entry), [*model.model_fields, *_LEGACY.get(name, ())], what=f"setting in {name}:"
                )


_LEGACY = {OPENAI_NAMESPACE: ("weight",), "": ("tinker",)}
"""Settings of older YAML files, and the section of tinker-atropos, a trainer that reads the same file; ignored."""


def _mode_defaults(mode: Mode, env_cls: type[CliEnv], config: BaseEnvConfig) -> dict[str, object]:
    if mode != "process":
        return {}
    path = config.data_path_to_save_groups or f"data/{env_cls.name or 'groups'}.jsonl"
    return {"ensure_scores_are_not_same": False, "include_messages": True, "data_path_to_save_groups": path}


def _servers(
    default: ServerBaseline | Sequence[APIServerConfig], yaml_config: Mapping[str, Json], flags: Mapping[str, Json]
) -> ServerBaseline | list[APIServerConfig]:
    base = default if isinstance(default, ServerBaseline) else next(iter(default), None)
    section = yaml_config.get(OPENAI_NAMESPACE) or {}
    one = section if isinstance(section, Mapping) else section[0] if len(section) == 1 else {}
    merged = {
        **(base.model_dump() if base else {}),
        **one,
        **extract_namespace(flags, f"{OPENAI_NAMESPACE}{NAMESPACE_SEP}"),
    }
    try:
        return resolve_openai_configs(
            default_server_configs=default,
            openai_config_dict=merged,
            yaml_config=yaml_config,
            cli_passed_flags=flags,
            logger=logger,
        )
    except ValidationError as error:
        raise ConfigError(mistakes(error, APIServerConfig, prefix=f"{OPENAI_NAMESPACE}.")) from None


def _validated(model: type[Model], values: Mapping[str, object], name: str) -> Model:
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(mistakes(error, model, prefix=f"{name}." if name else "")) from None


def _run_loop(env: CliEnv, mode: Mode) -> int:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        if mode == "evaluate":
            code = runner.run(env._run_evaluate()) or 0
        else:
            outcome = runner.run(env.process_manager() if mode == "process" else env.env_manager())
            code = outcome.exit_code if outcome is not None else 0
        if code == EXIT_WORK_REMAINS:
            leave_soon(code)
    return code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not available on every platform
        return None
    return uvloop.new_event_loop


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at that moment: a live display replaces it for a while."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        pass  # always the current one


def _configure_logging() -> None:
    calm_log.begin(logging.INFO, handler=_StderrHandler())
    for noisy in ("httpx", "httpcore", "openai", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
