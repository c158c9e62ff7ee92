"""`--check` of an environment: what it says of tokenizer and engines before anything starts."""

import asyncio

import pytest

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.envs.cli import main
from tests.data.small_tokenizer import write_tokenizer
from tests.fake_engine import running_engine
from tests.fakes import FakeTokenizer

SGLANG = {"model_path": "org/model", "tokenizer_path": "org/other", "vocab_size": 600}


class CheckedEnv(BaseEnv):
    name = "checked"

    @classmethod
    def config_init(cls):
        server = APIServerConfig(model_name="m", base_url="http://127.0.0.1:1/v1", server_type="sglang", api_key="x")
        return BaseEnvConfig(use_wandb=False), [server]

    @classmethod
    async def preview(cls, settings):
        return ["three problems"]


class OwnTokenizerEnv(CheckedEnv):
    def load_tokenizer(self):
        return FakeTokenizer()


async def check(*words: str, env_cls: type[BaseEnv] = CheckedEnv, mode: str = "process") -> int:
    return await asyncio.to_thread(main, env_cls, [mode, "--check", *words])


@pytest.mark.parametrize("mode", ["serve", "process", "evaluate"])
async def test_a_silent_engine_is_a_sentence(capsys, tmp_path, mode):
    assert await check("--env.tokenizer_name", str(write_tokenizer(tmp_path)), mode=mode) == 0
    assert capsys.readouterr().out.splitlines() == [
        "three problems",
        f"tokenizer {tmp_path}: 318 ids",
        "engine http://127.0.0.1:1/v1: no answer now; start it before the run, or correct openai.base_url. "
        "A run waits for it",
        f"checked {mode}: nothing found that would stop it",
    ]


async def test_a_tokenizer_that_follows_a_silent_engine_is_a_sentence_too(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert await check() == 0
    assert "a run takes that of its engine" in capsys.readouterr().out


async def test_a_tokenizer_that_is_named_and_not_there_is_an_error(capsys):
    assert await check("--env.tokenizer_name", "/nowhere/at/all") == 1
    assert "error: tokenizer /nowhere/at/all: " in capsys.readouterr().err


@pytest.mark.parametrize("server_type", ["sglang", "openai"])
async def test_an_engine_that_answers_is_named(capsys, tmp_path, server_type):
    async with running_engine() as engine:
        engine.about["/model_info"] = {**SGLANG, "tokenizer_path": str(write_tokenizer(tmp_path))}
        words = ("--openai.base_url", f"{engine.url}/v1", "--openai.server_type", server_type)
        assert await check("--env.tokenizer_name", str(tmp_path), *words) == 0
    says = {
        "sglang": f"serves org/model; the tokenizer {tmp_path} fits, as far as it tells",
        "openai": "answers, and does not say which tokenizer it has",
    }
    assert f"engine {engine.url}/v1: {says[server_type]}\n" in capsys.readouterr().out


async def test_an_engine_with_another_tokenizer_is_refused(capsys, tmp_path):
    async with running_engine() as engine:
        engine.about["/model_info"] = {**SGLANG, "vocab_size": 300}
        name = str(write_tokenizer(tmp_path))
        assert await check("--env.tokenizer_name", name, "--openai.base_url", f"{engine.url}/v1") == 2
    assert "serves org/model with the tokenizer org/other (300 ids)" in capsys.readouterr().err


async def test_an_environment_with_a_tokenizer_of_its_own_is_checked_without_it(capsys):
    assert await check(env_cls=OwnTokenizerEnv) == 0
    assert "tokenizer: made by OwnTokenizerEnv.load_tokenizer, not looked at" in capsys.readouterr().out


def test_settings_alone_ask_nobody(capsys):
    assert main(CheckedEnv, ["serve", "--check=settings", "--env.tokenizer_name", "/nowhere"]) == 0
    assert capsys.readouterr().out == "three problems\n"
    assert main(CheckedEnv, ["serve", "--check=engine"]) == 2
    assert "--check=engine is no check; give --check or --check=settings" in capsys.readouterr().err
