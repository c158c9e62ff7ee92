"""What the live engine reports is what it drew: ids, log-probabilities after temperature, text."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from atroposlib_engine.llama import Llama

PROMPT = [1, 4093, 198, 1780, 314, 216, 34, 27, 35, 47, 2, 198, 1, 520, 9531, 198]
VOCABULARY = 49152


def full_distribution(live_engine: Any, ids: list[int]) -> np.ndarray:
    """Log-probabilities of every next token at temperature 1."""
    reply = live_engine.generate(
        input_ids=ids, sampling_params={"max_new_tokens": 1}, return_logprob=True, top_logprobs_num=VOCABULARY
    )
    values = np.empty(VOCABULARY)
    for logprob, token, _ in reply["meta_info"]["output_top_logprobs"][0]:
        values[token] = logprob
    return values


def log_softmax(values: np.ndarray) -> np.ndarray:
    return values - np.log(np.exp(values - values.max()).sum()) - values.max()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_logprobs_are_those_after_temperature_computed_again_from_the_whole_distribution(live_engine, temperature):
    reply = live_engine.generate(
        input_ids=PROMPT,
        sampling_params={"temperature": temperature, "max_new_tokens": 3, "seed": 3, "ignore_eos": True},
        return_logprob=True,
    )
    reported = [logprob for logprob, _, _ in reply["meta_info"]["output_token_logprobs"]]
    before = [PROMPT + reply["output_ids"][:at] for at in range(3)]
    again = [
        log_softmax(full_distribution(live_engine, ids) / temperature)[token]
        for ids, token in zip(before, reply["output_ids"], strict=True)
    ]
    assert reported == pytest.approx(again, abs=0.02)  # other batch sizes round differently


def test_temperature_changes_the_reported_logprob_of_the_same_token(live_engine):
    values = {}
    for temperature in (0.7, 1.0):
        sampling = {"temperature": temperature, "max_new_tokens": 1, "top_k": 1}
        reply = live_engine.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
        values[temperature] = reply["meta_info"]["output_token_logprobs"][0]
    assert values[0.7][1] == values[1.0][1]
    assert values[0.7][0] > values[1.0][0] + 0.1


LLAMA_SERVER = """
import json, os, sys, urllib.request
os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx, params.warmup = sys.argv[1], 1, 256, False
params.hostnames, params.port, params.n_gpu_layers = ["127.0.0.1"], 0, 0
server = xllamacpp.Server(params)
body = {"prompt": json.loads(sys.argv[2]), "n_predict": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "n_probs": 50}
request = urllib.request.Request(server.listening_address + "/completion", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
reply = json.load(urllib.request.urlopen(request))
print("RESULT " + json.dumps([[e["id"], e["logprob"]] for e in reply["completion_probabilities"][0]["top_logprobs"]]))
"""


def test_logprobs_at_temperature_one_are_those_of_llama_cpps_own_server(live_engine, local_model):
    command = [sys.executable, "-c", LLAMA_SERVER, str(local_model.gguf), json.dumps(PROMPT)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    result = next(line for line in output.splitlines() if line.startswith("RESULT "))
    theirs = dict(json.loads(result.removeprefix("RESULT ")))
    ours = full_distribution(live_engine, PROMPT)
    assert [ours[token] for token in theirs] == pytest.approx(list(theirs.values()), abs=0.02)


def test_half_characters_are_reported_like_any_token(live_engine):
    """llama.cpp's own server drops ids and log-probabilities while the text ends inside a character."""
    half = 137  # the first byte of a two-byte character
    reply = live_engine.generate(
        input_ids=PROMPT, sampling_params={"max_new_tokens": 3, "logit_bias": {str(half): 1000.0}}, return_logprob=True
    )
    assert reply["output_ids"] == [half] * 3
    assert [token for _, token, _ in reply["meta_info"]["output_token_logprobs"]] == [half] * 3
    assert reply["text"] == "\ufffd" * 3


def test_scoring_the_output_as_a_prompt_gives_the_same_logprobs(live_engine):
    reply = live_engine.generate(
        input_ids=PROMPT, sampling_params={"max_new_tokens": 20, "ignore_eos": True, "seed": 1}, return_logprob=True
    )
    scored = live_engine.generate(
        input_ids=PROMPT + reply["output_ids"], sampling_params={"max_new_tokens": 1}, return_logprob=True,
        logprob_start_len=len(PROMPT) - 1,
    )  # fmt: skip
    generated = [logprob for logprob, _, _ in reply["meta_info"]["output_token_logprobs"]]
    again = [logprob for logprob, _, _ in scored["meta_info"]["input_token_logprobs"][1:]]
    assert again == pytest.approx(generated, abs=0.05)


def test_end_token_stays_in_ids_and_logprobs_and_not_in_the_text(live_engine):
    reply = live_engine.generate(input_ids=PROMPT, return_logprob=True, sampling_params={"logit_bias": {"2": 1000.0}})
    assert reply["output_ids"] == [2]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    assert reply["meta_info"]["output_token_logprobs_length"] == 1
    assert reply["text"] == ""


def test_the_same_seed_draws_the_same_tokens_and_the_n_of_a_request_differ(live_engine):
    sampling = {"max_new_tokens": 12, "seed": 11, "n": 3, "ignore_eos": True}
    first, second = (
        [reply["output_ids"] for reply in live_engine.generate(input_ids=PROMPT, sampling_params=sampling)]
        for _ in range(2)
    )
    assert first == second
    assert len({tuple(ids) for ids in first}) == 3


def test_n_computes_the_prompt_once(live_engine):
    prompt = list(range(1000, 1100))
    replies = live_engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 2, "n": 8})
    cached = sorted(reply["meta_info"]["cached_tokens"] for reply in replies)
    assert cached == [0, *[99] * 7]


def test_the_next_turn_computes_only_what_is_new(live_engine):
    prompt = list(range(2000, 2064))
    first = live_engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 8, "ignore_eos": True})
    turn = prompt + first["output_ids"] + [5, 6, 7]
    second = live_engine.generate(input_ids=turn, sampling_params={"max_new_tokens": 1})
    assert second["meta_info"]["cached_tokens"] == len(prompt) + 7


STRINGS = [
    "Hello, world!",
    " leading",
    "trailing  ",
    "two  spaces   three",
    "line\nbreak\r\n\ttab\n\n\n",
    "12345 + 67,890 = ?",
    "3.14159e-10",
    "it's we'll I'D they've",
    "naïve café über straße",
    "日本語のテキスト 中文 한국어",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 emoji",
    "def f(x):\n    return x**2  # comment",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|>",
    "a<|im_end",
    "Ω≈ç√∫˜µ≤",
    "\u00a0nbsp\u2003em\u200bzero",
    "MiXeD CaSe WORDS",
    "http://example.org/a?b=c&d=%20",
    '{"k": [1, 2, {"x": null}]}',
    "٣٤٥ १२३ Ⅷ ½ ²",
    "e\u0301 combining",
    "\x00\x01 control",
    "",
    " ",
    "\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "x" * 300,
    "The answer is \\boxed{42}.",
    "$\\frac{1}{2}$",
    "--- *** ___ ###",
    "don't stop!!!???...",
    "\ufffd\ufeff",
]


@pytest.fixture(scope="module")
def vocabulary(local_model):
    llama = Llama(local_model.gguf, slots=1, context=256)
    yield llama.vocabulary
    llama.close()


@pytest.fixture(scope="module")
def tokenizer(local_model):
    return AutoTokenizer.from_pretrained(local_model.tokenizer_dir)


@pytest.mark.parametrize("text", STRINGS)
def test_tokenizer_folder_gives_llama_cpps_ids_and_text(vocabulary, tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert vocabulary.encode(text) == ids
    assert vocabulary.decode(ids, special=True) == tokenizer.decode(ids)


def test_tokenizer_folder_gives_llama_cpps_ids_for_random_unicode(vocabulary, tokenizer):
    random = np.random.default_rng(0)
    ranges = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x4E00, 0x4F00), (0x1F300, 0x1F650), (0x30, 0x3A)]
    for _ in range(300):
        spans = random.integers(0, len(ranges), 12)
        text = "".join(chr(random.integers(*ranges[span])) + " " * int(random.integers(0, 2)) for span in spans)
        assert vocabulary.encode(text) == tokenizer.encode(text, add_special_tokens=False), repr(text)


def test_chat_template_renders_the_ids_that_sglang_was_sent(tokenizer):
    recorded = json.loads((Path(__file__).parent / "fixtures" / "generate_eos.json").read_text())
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+3?"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids == recorded["request"]["json"]["input_ids"]


def test_chat_route_sees_the_ids_that_sglang_was_sent(live_engine):
    reply = live_engine.client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "What is 2+3?"}], "temperature": 0}
    ).json()
    assert reply["choices"][0]["message"]["content"] == "2 + 3 = 5"
    assert reply["choices"][0]["matched_stop"] == 2
    assert reply["usage"]["prompt_tokens"] == 37


def test_text_of_any_ids_is_what_the_tokenizer_decodes(vocabulary, tokenizer):
    random = np.random.default_rng(1)
    for _ in range(200):
        ids = random.integers(17, VOCABULARY, 20).tolist()
        assert vocabulary.decode(ids) == tokenizer.decode(ids)
