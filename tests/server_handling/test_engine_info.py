"""What engines say of themselves, and that a tokenizer of another model is found before anything is generated."""

import asyncio
import json

import pytest

from atroposlib.data import tokenizers
from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.token_server import (
    EngineIdentity,
    ask_identity,
    is_foreign,
    load_for,
    probe_text,
    refuse_foreign,
)
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import AtroposError, ConfigError, ModelError, RequestFault
from tests.fakes import EOS, SPECIALS, FakeTokenizer
from tests.server_handling.conftest import sglang_server

PADDED = 300
"""An id that the tokenizer of 259 does not have, and an engine of 320 does."""


class Shifted(FakeTokenizer):
    """Another model's: every byte has another id."""

    def encode(self, text, add_special_tokens=True, **options):
        return [(token + 1) % 256 if token < 256 else token for token in super().encode(text, add_special_tokens)]


@pytest.fixture
def model_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 320}}))
    return str(tmp_path)


def told(folder):
    """(replies of the engine by path, vocabulary)"""
    return {
        "model info": ({"/model_info": {"model_path": "m", "tokenizer_path": "t", "vocab_size": 320}}, 320),
        "its older name": ({"/get_model_info": {"model_path": "m", "vocab_size": 320}}, 320),
        "server info": (
            {"/model_info": {"model_path": "m"}, "/get_server_info": {"model_path": "m", "vocab_size": 320}},
            320,
        ),
        "the model's config": ({"/model_info": {"model_path": folder}}, 320),
        "only a name": ({"/model_info": {"model_path": "m"}}, None),
    }


@pytest.mark.parametrize("case", told(""))
async def test_the_vocabulary_is_what_the_engine_or_its_model_says(engine, sglang, model_folder, case):
    engine.about, vocabulary = told(model_folder)[case]
    identity = await ask_identity(sglang.transport, "sglang", engine.url)
    assert identity is not None
    assert identity.vocabulary == vocabulary


async def test_vllm_names_its_model_in_the_list_of_models(engine, sglang, model_folder):
    engine.about["/v1/models"] = {"object": "list", "data": [{"id": "alias", "root": model_folder}]}
    identity = await ask_identity(sglang.transport, "vllm", engine.url)
    assert identity == EngineIdentity(model_folder, model_folder, 320)


async def test_an_engine_without_such_a_route_is_unknown(engine, sglang):
    assert await ask_identity(sglang.transport, "sglang", engine.url) is None
    await sglang.check_tokenizer(FakeTokenizer(), "any")
    assert engine.requests == []


@pytest.mark.parametrize("sizes", ["/model_info", "/get_server_info"])
async def test_the_first_request_of_a_process_already_names_the_weights(engine, sglang, sizes):
    engine.about["/get_server_info"] = {"model_path": "m"}
    engine.about["/model_info"] = {"model_path": "m", "weight_version": "12"}
    engine.about[sizes]["vocab_size"] = 320
    await sglang.check_tokenizer(FakeTokenizer(), "m")
    await sglang.tokens_and_logprobs_completion(input_ids=[1])
    assert engine.requests[0][1]["extra_key"] == " weights 12"


async def test_an_id_beyond_the_tokenizer_is_sent_to_an_engine_that_has_it(engine, sglang):
    engine.about["/model_info"] = {"model_path": "m", "vocab_size": 320}
    await sglang.tokens_and_logprobs_completion(input_ids=[1, PADDED])
    with pytest.raises(RequestFault, match="outside the vocabulary of 320 ids"):
        await sglang.tokens_and_logprobs_completion(input_ids=[1, 320])


async def test_the_ids_that_come_back_are_not_the_list_that_was_given(engine, sglang):
    given = [1, 2]
    prompt_ids, (output,), *_ = await sglang.tokens_and_logprobs_completion(input_ids=given)
    prompt_ids += output
    assert (given, engine.requests[-1][1]["input_ids"]) == ([1, 2], [1, 2])


async def test_an_id_that_the_engine_wrote_is_sent_back_though_its_vocabulary_is_unknown(engine, sglang):
    engine.scripted = [(200, engine._generations({"input_ids": [1], "sampling_params": {}}, [5, PADDED, EOS]))]
    managed = ManagedServer(sglang, sglang.tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    first = await managed.chat_completion(messages=messages)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    await managed.chat_completion(messages=[*messages, answer, *messages])
    (node,) = managed.get_state()["nodes"]
    assert PADDED in node.tokens
    with pytest.raises(RequestFault, match=f"outside the vocabulary of {PADDED + 1} ids"):
        await sglang.tokens_and_logprobs_completion(input_ids=[PADDED + 1])


def server_of(engine, kind):
    engine.about["/model_info"] = {"model_path": "m", "tokenizer_path": "their-tokenizer", "vocab_size": 320}
    if kind == "sglang":
        return sglang_server(engine)
    engine.about["/v1/models"] = {"object": "list", "data": [{"id": "fake", "root": "m"}]}
    return VLLMServer(APIServerConfig(server_type="vllm", model_name="fake", base_url=f"{engine.url}/v1"))


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_tokenizer_that_gives_other_ids_than_the_engine_is_refused(engine, kind):
    server = server_of(engine, kind)
    engine.reads = FakeTokenizer(add_bos=True).encode
    await server.check_tokenizer(FakeTokenizer(), "mine")
    with pytest.raises(ConfigError, match=r"the environment uses the tokenizer mine \(259 ids\): a short chat is \["):
        await server.check_tokenizer(Shifted(), "mine")
    await server.close()


async def test_an_engine_that_does_not_say_what_it_makes_of_a_text_refuses_nothing(engine):
    server = server_of(engine, "sglang")
    engine.scripted = [(400, {"error": {"message": "text is not supported"}})]
    await server.check_tokenizer(Shifted(), "mine")
    await server.close()


def test_other_cuts_of_the_same_text_are_the_same_tokenizer():
    tokenizer = FakeTokenizer()
    text = probe_text(tokenizer)
    assert not is_foreign(tokenizer, [SPECIALS["<bos>"], *tokenizer.encode(text)], text)
    assert not is_foreign(tokenizer, tokenizer.encode(text)[1:], text)  # of the first there is no log-probability
    assert is_foreign(tokenizer, tokenizer.encode(text)[-1:], text)
    assert is_foreign(tokenizer, Shifted().encode(text), text)
    spaced = text.replace("The sum", "The  sum")  # as another release might see spaces
    assert not is_foreign(tokenizer, tokenizer.encode(spaced), text)


def test_a_special_token_that_the_engine_cuts_into_pieces_is_another_tokenizer():
    class Marked(FakeTokenizer):
        def get_added_vocab(self):
            return SPECIALS

    text = probe_text(Marked())
    pieces = [piece for token in Marked().encode(text) for piece in ([60, 124] if token == EOS else [token])]
    assert is_foreign(Marked(), pieces, text)


def test_a_tokenizer_with_more_base_ids_than_the_engine_is_refused_without_an_echo():
    class Large(FakeTokenizer):
        vocab_size = 1000

    with pytest.raises(ConfigError, match=r"serves m with the tokenizer t \(320 ids\).*Set env.tokenizer_name to t"):
        refuse_foreign(Large(), "mine", "http://e", EngineIdentity("m", "t", 320), None, "text")
    refuse_foreign(FakeTokenizer(), "mine", "http://e", EngineIdentity("m", "t", None), None, "text")


DEFAULT = BaseEnvConfig().tokenizer_name


@pytest.fixture
def loads(monkeypatch):
    """Only these can be loaded; a tokenizer is its name."""
    known = {DEFAULT, "chosen", "the-servers", "the-engines", "the-model"}

    def load(name):
        if name not in known:
            raise ModelError(name)
        return name

    monkeypatch.setattr(tokenizers, "load_tokenizer", load)
    return known


FOLLOWED = {
    "the environment's own": ("chosen", {"tokenizer_name": "the-servers"}, "chosen"),
    "the servers' setting": (DEFAULT, {"tokenizer_name": "the-servers"}, "the-servers"),
    "what the engine says": (DEFAULT, {}, "the-engines"),
    "an endpoint without ids": (DEFAULT, {"server_type": "openai"}, DEFAULT),
}


@pytest.mark.parametrize(("name", "options", "expected"), FOLLOWED.values(), ids=FOLLOWED)
async def test_a_tokenizer_that_is_not_set_follows_the_served_model(engine, loads, name, options, expected):
    engine.about["/model_info"] = {"model_path": "m", "tokenizer_path": "the-engines"}
    config = APIServerConfig(
        **{"server_type": "sglang", "model_name": "the-model", "base_url": f"{engine.url}/v1", **options}
    )
    assert await asyncio.to_thread(load_for, name, [config]) == (expected, expected)


async def test_without_an_engine_the_named_model_has_the_tokenizer(engine, loads):
    await engine.stop()
    config = APIServerConfig(server_type="sglang", model_name="the-model", base_url=f"{engine.url}/v1")
    assert await asyncio.to_thread(load_for, DEFAULT, [config]) == ("the-model", "the-model")


class ServedEnv(BaseEnv):
    """Never gets to roll anything out."""

    name = "served"

    def load_tokenizer(self):
        return Shifted()

    async def get_next_item(self):
        raise AssertionError("the tokenizer should have been refused before")


MODES = {
    "serve": lambda env: env.env_manager(),
    "process": lambda env: env.process_manager(),
    "evaluate": lambda env: env._run_evaluate(),
}


@pytest.mark.parametrize("run", MODES.values(), ids=MODES)
async def test_every_mode_refuses_a_tokenizer_of_another_model_at_its_start(engine, tmp_path, run):
    engine.about["/model_info"] = {"model_path": "m", "tokenizer_path": "theirs", "vocab_size": 320}
    engine.reads = FakeTokenizer().encode
    config = BaseEnvConfig(
        tokenizer_name="mine", use_wandb=False, data_path_to_save_groups=str(tmp_path / "o.jsonl"), total_steps=1
    )
    server = APIServerConfig(server_type="sglang", model_name="m", base_url=f"{engine.url}/v1")
    with pytest.raises(AtroposError, match="with the tokenizer theirs"):
        await run(ServedEnv(config, [server]))
