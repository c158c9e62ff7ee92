"""Environments whose groups carry a teacher's view: its top-k token ids and log-probabilities at every position.

    class MyEnv(TeacherDistillationEnv):
        @classmethod
        def teacher_config_init(cls):
            return APIServerConfig(model_name="big", base_url="http://localhost:9010/v1", server_type="sglang")

    python env.py serve --env.teacher_enabled true --env.teacher_top_k 8 --teacher.base_url http://host:9010/v1

Positions are those of the student's tokens, so both models must share one vocabulary.
"""

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, Field, PrivateAttr

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ServerConfigs, Trajectories
from atroposlib.envs.server_handling.openai_server import resolve_openai_configs
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ConfigError
from atroposlib.rollouts.groups import as_groups
from atroposlib.rollouts.trace import tracing
from atroposlib.type_definitions import Item, Json, ScoredDataGroup
from atroposlib.utils.cli import extract_namespace, merge_dicts

if TYPE_CHECKING:
    from atroposlib.envs.cli import Settings

logger = logging.getLogger(__name__)

TeacherView = tuple[list[list[int]], list[list[float]]]
"""Token ids [T][k] and log-probabilities [T][k] of one sequence. k may be 0 at the first position."""


class TeacherDistillationConfig(BaseEnvConfig):
    """Settings of the teacher, in addition to those of every environment."""

    teacher_enabled: bool = Field(default=False, description="Ask a teacher for its view of every sequence.")
    teacher_top_k: int = Field(
        default=0,
        ge=-1,
        description="Likeliest tokens per position to ask the teacher for; 0: only the token itself; -1: do not ask.",
    )
    _teacher_server_configs: ServerConfigs | None = PrivateAttr(None)  # for constructors without that argument


class TeacherDistillationEnv(BaseEnv):
    """Attaches `distill_token_ids` and `distill_logprobs` [G][T][k] to every group before it is stored and sent.

    `group_overrides` of a group may say `teacher_top_k`, or `skip_teacher_top_k: true`. When the teacher fails for one
    sequence, or answers with other lengths, both arrays of the whole group are None and the group continues without.
    """

    env_config_cls = TeacherDistillationConfig
    config: TeacherDistillationConfig
    teacher_namespace = "teacher"

    def __init__(
        self,
        config: TeacherDistillationConfig,
        server_configs: ServerConfigs,
        teacher_server_configs: ServerConfigs | bool | None = None,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        """
        Args:
            config: see `TeacherDistillationConfig`.
            server_configs: of the student.
            teacher_server_configs: of the teacher; one config, a list, or a ServerBaseline. A bool is the `slurm` of a
                subclass that calls with BaseEnv's positions (config, server_configs, slurm, testing).
            slurm: of the student's servers.
            testing: of the student's servers.

        Raises:
            ConfigError: the teacher is enabled without servers, or has another vocabulary.
        """
        if isinstance(teacher_server_configs, bool):
            teacher_server_configs, slurm, testing = None, teacher_server_configs, slurm
        super().__init__(config, server_configs, slurm, testing)
        self.teacher_server: ServerManager | None = None
        if not config.teacher_enabled:
            return
        teacher_server_configs = teacher_server_configs or config._teacher_server_configs
        if teacher_server_configs is None:
            raise ConfigError(
                "env.teacher_enabled is true, but no teacher server configuration was provided; set --teacher.base_url "
                "and --teacher.model_name, a teacher: section in the YAML file, or teacher_config_init"
            )
        if isinstance(teacher_server_configs, APIServerConfig):
            teacher_server_configs = [teacher_server_configs]
        for name in _tokenizer_names(teacher_server_configs):
            self._validate_teacher_tokenizer_compatibility(name)
        self.teacher_server = ServerManager(teacher_server_configs, slurm=False, testing=False)

    @classmethod
    def teacher_config_init(cls) -> ServerConfigs | None:
        """Optional: default servers of the teacher; None: only YAML and flags name them."""
        return None

    @classmethod
    def extra_namespaces(cls, mode: str) -> dict[str, type[BaseModel]]:
        """`--teacher.<field>` and `teacher:` set the teacher's server, in every mode."""
        return {**super().extra_namespaces(mode), cls.teacher_namespace: APIServerConfig}

    @classmethod
    def from_settings(cls, settings: "Settings") -> Self:
        """The environment with the teacher that flags, YAML and `teacher_config_init` describe."""
        teacher = cls._resolve_teacher_server_configs(cls.teacher_config_init(), settings.yaml_config, settings.flags)
        config = settings.env
        assert isinstance(config, TeacherDistillationConfig)  # made from env_config_cls
        config._teacher_server_configs = teacher
        arguments = {"slurm": settings.manager.slurm, "testing": settings.manager.testing}
        if "teacher_server_configs" in inspect.signature(cls).parameters:
            env = cls(config, settings.servers, teacher_server_configs=teacher, **arguments)
        else:
            env = cls(config, settings.servers, **arguments)
        env.use_manager_settings(settings)
        return env

    async def handle_send_to_api(
        self,
        scored_data: Trajectories,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> int:
        """As `BaseEnv.handle_send_to_api`, after the teacher's view is attached."""
        await asyncio.gather(*map(self._attach_teacher_distillation, as_groups(scored_data)))
        return await super().handle_send_to_api(scored_data, item, do_send_to_api, abort_on_any_max_length_exceeded)

    @classmethod
    def _resolve_teacher_server_configs(
        cls,
        default_teacher_server_configs: ServerConfigs | None,
        yaml_config: Mapping[str, Json] | None,
        cli_passed_flags: Mapping[str, Json],
    ) -> ServerConfigs | None:
        """Flags over YAML over the default, as for the student's servers. None when none of them says anything."""
        section = (yaml_config or {}).get(cls.teacher_namespace)
        flags = extract_namespace(cli_passed_flags, f"{cls.teacher_namespace}.")
        default = default_teacher_server_configs
        if default is None and not section and not flags:
            return None
        if default is None or isinstance(default, APIServerConfig):
            default = [default or APIServerConfig()]
        first = default if isinstance(default, ServerBaseline) else default[0]
        entries: list[Mapping[str, Json]] = section if isinstance(section, list) else [section or {}]
        return resolve_openai_configs(
            default_server_configs=default,
            openai_config_dict=merge_dicts(first.model_dump(), *entries[:1], flags),
            yaml_config={"openai": section} if section else {},
            cli_passed_flags={f"openai.{name}": value for name, value in flags.items()},
            logger=logger,
        )

    async def _attach_teacher_distillation(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """Set both arrays of the group, in place."""
        top_k, sequences = self._top_k_of(group), group.get("tokens")
        views = await self._fetch_teacher_for_group(sequences, top_k) if sequences and top_k is not None else None
        group["distill_token_ids"] = [ids for ids, _ in views] if views else None
        group["distill_logprobs"] = [logprobs for _, logprobs in views] if views else None
        return group

    def _top_k_of(self, group: ScoredDataGroup) -> int | None:
        """Return what to ask the teacher for; None: nothing."""
        overrides = group.get("group_overrides") or {}
        top_k = overrides.get("teacher_top_k", self.config.teacher_top_k)
        skipped = overrides.get("skip_teacher_top_k") or top_k <= -1
        return None if skipped or self.teacher_server is None else top_k

    async def _fetch_teacher_for_group(self, sequences: Sequence[list[int]], top_k: int) -> list[TeacherView] | None:
        """[G]; None when one sequence has no usable view."""
        fetches = [self._fetch_teacher_for_sequence(sequence, top_k) for sequence in sequences]
        results = await asyncio.gather(*fetches, return_exceptions=True)
        views = []
        for result, sequence in zip(results, sequences, strict=True):
            problem = result if isinstance(result, BaseException) else _mismatch(result, len(sequence))
            if problem is not None:
                logger.warning("group without a teacher's view: sequences=%d reason=%s", len(sequences), problem)
                return None
            views.append(result)
        return views

    async def _fetch_teacher_for_sequence(self, token_ids: list[int], top_k: int) -> TeacherView:
        """The teacher's view of one sequence; raises what `ServerManager.get_logprobs` raises."""
        assert self.teacher_server is not None
        with tracing():  # a trace of its own, thrown away: the teacher's tokens are not the rollout's
            view = await self.teacher_server.get_logprobs(input_ids=token_ids, top_k=top_k, max_tokens=1, split="train")
        return view["prompt_topk_token_ids"], view["prompt_topk_logprobs"]

    def _validate_teacher_tokenizer_compatibility(self, teacher_tokenizer_name: str) -> None:
        """ConfigError unless student and teacher share a tokenizer's name or a vocabulary."""
        student = self.tokenizer.name_or_path
        if teacher_tokenizer_name == student:
            return
        from transformers import AutoTokenizer

        try:
            theirs = AutoTokenizer.from_pretrained(teacher_tokenizer_name).get_vocab()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"Cross-tokenizer distillation is not supported, and the teacher's tokenizer "
                f"{teacher_tokenizer_name!r} cannot be loaded for a comparison with the student's {student!r}: "
                f"{error}; set --teacher.tokenizer_name"
            ) from error
        if theirs != self.tokenizer.get_vocab():
            raise ConfigError(
                f"Cross-tokenizer distillation is not supported: the teacher's tokenizer {teacher_tokenizer_name!r} "
                f"({len(theirs)} tokens) has another vocabulary than the student's {student!r}"
            )


def _tokenizer_names(configs: ServerConfigs) -> set[str]:
    servers = [configs] if isinstance(configs, ServerBaseline) else configs
    return {server.model_name if server.tokenizer_name == "none" else server.tokenizer_name for server in servers}


def _mismatch(view: TeacherView, length: int) -> str | None:
    """Return what is wrong with the shape of a view; None: nothing."""
    ids, logprobs = view
    if len(ids) != length or len(logprobs) != length:
        return f"{len(ids)} positions of ids and {len(logprobs)} of log-probabilities for {length} tokens"
    ragged = sum(len(a) != len(b) for a, b in zip(ids, logprobs, strict=True))
    return f"ids and log-probabilities differ in number at {ragged} positions" if ragged else None
