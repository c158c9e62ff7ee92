from types import SimpleNamespace

import pytest

from atroposlib.envs import teacher_distillation_env as module
from atroposlib.envs.base import APIServerConfig, BaseEnv, ServerBaseline
from atroposlib.envs.cli import resolve
from atroposlib.envs.teacher_distillation_env import TeacherDistillationConfig, TeacherDistillationEnv
from atroposlib.errors import ConfigError, EngineFault
from atroposlib.rollouts.trace import current_trace, tracing

TEACHER = APIServerConfig(model_name="student-tok", base_url="http://teacher/v1", server_type="sglang")


class Vocabulary:
    name_or_path = "student-tok"

    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


class Teacher:
    """Answers k ids per position; remembers how it was made and asked."""

    def __init__(self, configs, slurm=False, testing=False):
        self.configs, self.slurm, self.testing = configs, slurm, testing
        self.asked = []

    async def get_logprobs(self, *, input_ids, top_k, **kwargs):
        self.asked.append((input_ids, top_k))
        self.trace = current_trace()
        if 666 in input_ids:
            raise EngineFault("teacher is down")
        length = len(input_ids) - (7 in input_ids)
        row = max(1, top_k)
        return {
            "prompt_tokens": input_ids,
            "prompt_topk_token_ids": [[1] * row] * length,
            "prompt_topk_logprobs": [[-0.5] * (row + (8 in input_ids))] * length,
        }


@pytest.fixture(autouse=True)
def without_servers(monkeypatch):
    def init(self, config, server_configs, slurm=False, testing=False):
        self.config, self.tokenizer, self.server = config, Vocabulary("a", "b"), SimpleNamespace()

    monkeypatch.setattr(module.BaseEnv, "__init__", init)
    monkeypatch.setattr(module, "ServerManager", Teacher)


def environment(teacher=TEACHER, **options):
    settings = {"teacher_enabled": True, "teacher_top_k": 2, "tokenizer_name": "student-tok", **options}
    return TeacherDistillationEnv(TeacherDistillationConfig(**settings), [], teacher_server_configs=teacher)


def group(*tokens, **overrides):
    return {"tokens": list(tokens), "masks": list(tokens), "scores": [0.0] * len(tokens), "group_overrides": overrides}


async def test_every_sequence_gets_the_teachers_view():
    env = environment()
    attached = await env._attach_teacher_distillation(group([1, 2, 3], [4]))
    assert attached["distill_token_ids"] == [[[1, 1]] * 3, [[1, 1]]]
    assert attached["distill_logprobs"] == [[[-0.5, -0.5]] * 3, [[-0.5, -0.5]]]
    assert env.teacher_server.asked == [([1, 2, 3], 2), ([4], 2)]


async def test_the_teachers_tokens_do_not_count_as_the_rollouts():
    env = environment()
    with tracing() as rollout:
        await env._attach_teacher_distillation(group([1, 2]))
    assert env.teacher_server.trace is not None
    assert env.teacher_server.trace is not rollout


SKIPPED = {
    "by the group": ({"skip_teacher_top_k": True}, {}),
    "by the group's k": ({"teacher_top_k": -1}, {}),
    "by the config's k": ({}, {"teacher_top_k": -1}),
    "disabled": ({}, {"teacher_enabled": False}),
}


@pytest.mark.parametrize(("overrides", "options"), SKIPPED.values(), ids=SKIPPED)
async def test_a_group_that_is_skipped_asks_nothing(overrides, options):
    env = environment(**options)
    attached = await env._attach_teacher_distillation(group([1, 2], **overrides))
    assert (attached["distill_token_ids"], attached["distill_logprobs"]) == (None, None)
    assert env.teacher_server is None or env.teacher_server.asked == []


async def test_a_group_may_ask_for_another_k():
    attached = await environment()._attach_teacher_distillation(group([1], teacher_top_k=3))
    assert attached["distill_token_ids"] == [[[1, 1, 1]]]


FAILED = {"teacher down": 666, "positions missing": 7, "ids without logprobs": 8}


@pytest.mark.parametrize("token", FAILED.values(), ids=FAILED)
async def test_one_failed_sequence_leaves_the_whole_group_without(token, caplog):
    attached = await environment()._attach_teacher_distillation(group([1, 2], [token]))
    assert (attached["distill_token_ids"], attached["distill_logprobs"]) == (None, None)
    assert "group without a teacher's view: sequences=2" in caplog.text


async def test_the_view_is_attached_before_the_groups_are_sent(monkeypatch):
    sent = []

    async def send(self, scored_data, *rest):
        sent.append(scored_data)
        return len(scored_data)

    monkeypatch.setattr(BaseEnv, "handle_send_to_api", send)
    assert await environment().handle_send_to_api([group([1]), None, group([2])]) == 3
    assert [g and g["distill_token_ids"] for g in sent[0]] == [[[[1, 1]]], None, [[[1, 1]]]]


def test_a_bare_teacher_config_is_a_list_of_one():
    teacher = environment().teacher_server
    assert (teacher.configs, teacher.slurm, teacher.testing) == ([TEACHER], False, False)


def test_an_enabled_teacher_needs_servers():
    with pytest.raises(ValueError, match="no teacher server configuration was provided"):
        environment(teacher=None)


@pytest.mark.parametrize("words", [("a", "b"), ("a", "c")])
def test_another_tokenizer_must_have_the_same_vocabulary(monkeypatch, words):
    import transformers

    names = []
    monkeypatch.setattr(
        transformers,
        "AutoTokenizer",
        SimpleNamespace(from_pretrained=lambda name: names.append(name) or Vocabulary(*words)),
    )
    other = TEACHER.model_copy(update={"tokenizer_name": "other-tok"})
    if words == ("a", "b"):
        environment(teacher=other)
    else:
        with pytest.raises(ConfigError, match="Cross-tokenizer distillation is not supported"):
            environment(teacher=other)
    assert names == ["other-tok"]


RESOLVED = {
    "nothing said": (None, {}, {}, None),
    "default": (TEACHER, {}, {}, ["http://teacher/v1"]),
    "yaml over default": (TEACHER, {"teacher": {"base_url": "http://yaml/v1"}}, {}, ["http://yaml/v1"]),
    "flag over yaml": (
        TEACHER,
        {"teacher": {"base_url": "http://yaml/v1"}},
        {"teacher.base_url": "http://flag/v1", "openai.base_url": "http://student/v1"},
        ["http://flag/v1"],
    ),
    "flag alone": (None, None, {"teacher.base_url": "http://flag/v1"}, ["http://flag/v1"]),
    "several in yaml": (
        None,
        {"teacher": [{"base_url": "http://one/v1"}, {"base_url": "http://two/v1"}]},
        {},
        ["http://one/v1", "http://two/v1"],
    ),
}


@pytest.mark.parametrize(("default", "yaml", "flags", "urls"), RESOLVED.values(), ids=RESOLVED)
def test_the_teacher_comes_from_flags_yaml_or_code(default, yaml, flags, urls):
    resolved = TeacherDistillationEnv._resolve_teacher_server_configs(default, yaml, flags)
    assert (resolved and [config.base_url for config in resolved]) == urls


def test_the_teachers_section_is_resolved_like_the_students(monkeypatch):
    seen = {}
    monkeypatch.setattr(module, "resolve_openai_configs", lambda **kwargs: seen.update(kwargs) or ["resolved"])
    resolved = TeacherDistillationEnv._resolve_teacher_server_configs(
        TEACHER, {"teacher": {"model_name": "m"}}, {"teacher.timeout": 5}
    )
    assert resolved == ["resolved"]
    assert seen["openai_config_dict"]["model_name"] == "m"
    assert seen["openai_config_dict"]["timeout"] == 5
    assert seen["yaml_config"] == {"openai": {"model_name": "m"}}
    assert seen["cli_passed_flags"] == {"openai.timeout": 5}


@pytest.mark.parametrize("mode", ["serve", "process", "evaluate"])
def test_every_mode_takes_teacher_flags(mode):
    assert TeacherDistillationEnv.extra_namespaces(mode) == {"teacher": APIServerConfig}


class Student(TeacherDistillationEnv):
    @classmethod
    def config_init(cls):
        return TeacherDistillationConfig(tokenizer_name="student-tok", use_wandb=False), [TEACHER]


TEACHER_FLAGS = [
    "--teacher.base_url",
    "http://flag/v1",
    "--teacher.model_name",
    "student-tok",
    "--teacher.timeout",
    "9",
]


@pytest.mark.parametrize("mode", ["serve", "process", "evaluate"])
def test_the_command_line_makes_the_teacher(mode):
    settings = resolve(Student, mode, ["--env.teacher_enabled", "true", "--env.teacher_top_k", "4", *TEACHER_FLAGS])
    env = Student.from_settings(settings)
    [teacher] = env.teacher_server.configs
    assert (teacher.base_url, teacher.timeout, env.config.teacher_top_k) == ("http://flag/v1", 9, 4)


def test_a_proxy_is_used_as_by_every_environment():
    assert Student.from_settings(resolve(Student, "process", ["--proxy_url", "http://proxy:1"])).server.use_proxy


class ByName(Student):
    def __init__(self, config, server_configs, slurm=False, testing=False):
        super().__init__(config, server_configs, slurm=slurm, testing=testing)


class ByPosition(Student):
    def __init__(self, config, server_configs, slurm=True, testing=False):
        super().__init__(config, server_configs, slurm, testing)


class ByTeacher(Student):
    def __init__(self, config, server_configs, teacher_server_configs, slurm, testing):
        super().__init__(config, server_configs, teacher_server_configs, slurm, testing)


@pytest.mark.parametrize("mode", ["serve", "process", "evaluate"])
@pytest.mark.parametrize("env_cls", [ByName, ByPosition, ByTeacher])
def test_a_subclass_gets_its_teacher_whatever_its_constructor_knows(env_cls, mode):
    assert env_cls.from_settings(resolve(env_cls, mode, [])).teacher_server is None
    env = env_cls.from_settings(resolve(env_cls, mode, ["--env.teacher_enabled", "true", *TEACHER_FLAGS]))
    assert [teacher.base_url for teacher in env.teacher_server.configs] == ["http://flag/v1"]


def test_a_teachers_tokenizer_that_cannot_be_loaded_is_named(tmp_path):
    other = TEACHER.model_copy(update={"tokenizer_name": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=r"none.*cannot be loaded.*--teacher.tokenizer_name"):
        environment(teacher=other)


def test_a_discovered_teacher_stays_a_baseline():
    baseline = ServerBaseline(model_name="student-tok")
    assert TeacherDistillationEnv._resolve_teacher_server_configs(baseline, {}, {}) == baseline


def test_the_config_refuses_a_k_below_minus_one():
    assert TeacherDistillationConfig().teacher_top_k == 0
    with pytest.raises(ValueError, match="teacher_top_k"):
        TeacherDistillationConfig(teacher_top_k=-2)
