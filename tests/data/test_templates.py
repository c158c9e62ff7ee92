import pytest
from small_tokenizer import R1, TEMPLATES, write_tokenizer
from transformers import AutoTokenizer

from atroposlib.data.templates import TemplateRenderer
from atroposlib.errors import DataError

ANSWER = "<think>\n2 + 3\n</think>\n\nfive"
CHAT = [{"role": "user", "content": "two plus three?"}, {"role": "assistant", "content": ANSWER}]
SURE = "<think>\nagain\n</think>  yes, five\n"
TWO_TURNS = [*CHAT, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": SURE}]
ENDS = {"ChatML": "<|im_end|>", "Qwen 3": "<|im_end|>", "Gemma": "<|end_turn|>"}


def renderer_of(folder, template):
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(folder, template))
    return tokenizer, TemplateRenderer(tokenizer)


def trained_text(tokenizer, labels):
    return tokenizer.decode([label for label in labels if label != -100])


@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_the_answer_and_its_end_are_trained(tmp_path, name):
    tokenizer, renderer = renderer_of(tmp_path, TEMPLATES[name])
    ((ids, labels),) = renderer.encode([renderer.segments(CHAT)])
    end = ENDS.get(name, "<|eot|>")
    given_by_prompt = "<think>\n" if name == "R1 with opened think" else ""
    assert trained_text(tokenizer, labels) == (ANSWER + end).removeprefix(given_by_prompt)
    assert ANSWER in tokenizer.decode(ids)


@pytest.mark.parametrize("name", TEMPLATES)
def test_all_turns_are_trained_and_questions_are_not(tmp_path, name):
    tokenizer, renderer = renderer_of(tmp_path, TEMPLATES[name])
    ((ids, labels),) = renderer.encode([renderer.segments(TWO_TURNS)])
    end = ENDS.get(name, "<|eot|>")
    assert trained_text(tokenizer, labels).count(end) == 2
    assert "yes, five" in trained_text(tokenizer, labels)
    assert "sure?" not in trained_text(tokenizer, labels)
    assert tokenizer.decode(ids).count("<think>") == 2


def test_the_prompt_is_tokenised_as_the_engine_saw_it(tmp_path):
    tokenizer, renderer = renderer_of(tmp_path, TEMPLATES["Llama 3"])
    ((ids, labels),) = renderer.encode([renderer.segments(CHAT)])
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt
    assert labels[: len(prompt)] == [-100] * len(prompt)
    assert labels[len(prompt)] != -100


def test_an_answer_cut_by_its_length_limit_has_no_trained_end(tmp_path):
    tokenizer, renderer = renderer_of(tmp_path, TEMPLATES["ChatML"])
    ((_, labels),) = renderer.encode([renderer.segments(CHAT, is_cut=True)])
    assert trained_text(tokenizer, labels) == ANSWER


def test_an_end_that_was_recorded_is_not_doubled(tmp_path):
    tokenizer, renderer = renderer_of(tmp_path, TEMPLATES["ChatML"])
    recorded = [CHAT[0], {"role": "assistant", "content": "five<|im_end|>"}]
    ((_, labels),) = renderer.encode([renderer.segments(recorded)])
    assert trained_text(tokenizer, labels) == "five<|im_end|>"


REFUSED = {
    "leaves answers out": ("{% for m in messages %}{{ m['role'] }}{% endfor %}", "leaves out an assistant message"),
    "repeats answers": (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if not add_generation_prompt %}"
        "{{ '<|eot|>' + messages[1]['content'] }}{% endif %}",
        "outside its turn",
    ),
    "raises": ("{{ raise_exception('no thanks') }}", "no thanks"),
}


@pytest.mark.parametrize(("template", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_template_that_would_falsify_labels_is_refused(tmp_path, template, reason):
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, template))
    with pytest.raises(DataError, match=reason):
        TemplateRenderer(tokenizer)


def test_a_tokenizer_without_template_is_refused(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, None))
    with pytest.raises(DataError, match="no chat template"):
        TemplateRenderer(tokenizer)


def test_the_fixture_r1_template_does_drop_reasoning_by_itself(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, R1))
    assert "2 + 3" not in tokenizer.apply_chat_template(CHAT, tokenize=False)


BAD_CHATS = {
    "no assistant": (CHAT[:1], "no assistant message"),
    "content null": ([CHAT[0], {"role": "assistant", "content": None}], "wrote nothing"),
}


@pytest.mark.parametrize(("chat", "reason"), BAD_CHATS.values(), ids=BAD_CHATS)
def test_a_conversation_without_text_to_train_on_is_refused(tmp_path, chat, reason):
    _, renderer = renderer_of(tmp_path, TEMPLATES["ChatML"])
    with pytest.raises(DataError, match=reason):
        renderer.segments(chat)
