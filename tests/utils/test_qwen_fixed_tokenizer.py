import copy
import json
import pickle

import pytest

from atroposlib.utils.tokenizers.qwen_fixed_tokenizer import QwenFixedTokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tokenizer")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=specials))
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return QwenFixedTokenizer(str(folder))


def render(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


def test_a_plain_conversation(tokenizer):
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
    ]
    assert render(tokenizer, messages) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n"
    )


def test_tools_join_the_system_message(tokenizer):
    text = render(tokenizer, [{"role": "system", "content": "be kind"}], tools=[TOOL], add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nbe kind\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert text.count("<|im_start|>system") == 1
    assert text.endswith("</tool_call><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}], ids=["text", "object"])
def test_calls_and_results_are_rendered_as_the_models_know_them(tokenizer, arguments):
    call = copy.deepcopy(CALL)
    call["function"]["arguments"] = arguments
    messages = [
        {"role": "user", "content": "sum"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert render(tokenizer, messages).split("<|im_start|>", 2)[2] == (
        f"assistant\n{called}\n{called}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )


def test_ids_are_a_plain_list(tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert isinstance(ids, list)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n"


def test_it_works_like_the_tokenizer_it_wraps(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer("hi")["input_ids"] == tokenizer.encode("hi")
    assert len(tokenizer) == len(tokenizer.tokenizer)
    assert pickle.loads(pickle.dumps(tokenizer)).encode("hi") == tokenizer.encode("hi")
