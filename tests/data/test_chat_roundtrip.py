"""Any chat, as a record, through each format and the loader of `transformers`: what was generated is trained, no more.

The template marks what the assistant says with `{% generation %}`, as trainers do that render with assistant masks.
"""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_factory import chat_group, write_groups
from small_tokenizer import write_tokenizer
from transformers import AutoTokenizer

from atroposlib.data.sft import SftOptions, export_sft
from atroposlib.data.templates import TemplateRenderer

GENERATION = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n<call>' + c.function.name + ' ' }}"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}</call>{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content or [] %}{{ part.text }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = st.text(st.characters(exclude_categories=["Cs", "Co"]), min_size=1, max_size=12).map(
    lambda text: text.replace("<", "(").replace("[INST]", "")
)
WORDS = st.text("abcdefghij", min_size=1, max_size=6)
PARTS = st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=2)
# whole numbers up to 2**53: what any JSON reader takes
ARGUMENTS = st.dictionaries(WORDS, st.one_of(TEXT, st.integers(-(2**53), 2**53), st.booleans(), st.none()), max_size=2)
CALLS = st.builds(
    lambda name, arguments, as_text: {
        "id": f"call_{name}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments},
    },
    WORDS,
    ARGUMENTS,
    st.booleans(),
)
OTHERS = st.one_of(
    st.builds(
        lambda content, name: {"role": "user", "content": content, **name},
        TEXT | PARTS,
        st.just({}) | st.just({"name": "ada"}),
    ),
    st.builds(lambda content: {"role": "tool", "tool_call_id": "call_x", "content": content}, TEXT),
)


@st.composite
def turns(draw):
    """One message of the assistant in which it wrote something."""
    message = {"role": "assistant"}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(TEXT)
    calls = draw(st.lists(CALLS, max_size=2))
    content = draw(TEXT if not calls else st.one_of(TEXT, st.just(""), st.none(), st.just(...)))
    message |= {"tool_calls": calls} if calls else {}
    message |= {"content": content} if content is not ... else {}
    return message | draw(st.just({}) | st.just({"unknown": {"n": [1, None, "\u2028"]}}))


@st.composite
def chats(draw):
    """Messages, and which of the assistant's turns were generated: the last, or all but a first few."""
    messages = []
    for _ in range(draw(st.integers(1, 3))):
        messages += [*draw(st.lists(OTHERS, min_size=1, max_size=2)), draw(turns())]
    spoken = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    return messages, draw(st.sampled_from([spoken, spoken[-1:]]))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(write_tokenizer(tmp_path_factory.mktemp("g"), GENERATION))


def export(group, **options):
    with tempfile.TemporaryDirectory() as folder:
        rollouts = write_groups(Path(folder, "a.jsonl"), [group])
        report = export_sft(rollouts, Path(folder, "o.jsonl"), options=SftOptions(**options))
        return [json.loads(line) for line in Path(folder, "o.jsonl").read_bytes().split(b"\n")[:-1]], report


def in_one_part(message):
    """The content of a message as its text where it is given in parts."""
    parts = message.get("content")
    return {"content": "".join(part["text"] for part in parts)} if isinstance(parts, list) else {}


def trained_by_a_trainer(tokenizer, prompt, completion):
    """What assistant masks train of a completion behind its prompt, as text."""
    both = tokenizer.apply_chat_template(
        [*prompt, *completion], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    ids, mask = both["input_ids"], both["assistant_masks"]
    start = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
    return tokenizer.decode([token for at, token in enumerate(ids) if at >= start and mask[at]])


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(chats())
def test_any_chat_survives_every_format_and_exactly_what_was_generated_is_trained(tokenizer, chat):
    messages, generated = chat
    mask = "." + "".join("x." if at in generated else "." for at in range(len(messages)))
    rows, _ = export(chat_group([messages], [mask.rstrip(".")]), format="messages")
    for kept, message in zip(rows[0]["messages"], messages, strict=True):
        said = {key: kept[key] for key in kept if key != "weight"}
        assert said == {"content": None, **message} | in_one_part(message)
    weighted = [at for at, kept in enumerate(rows[0]["messages"]) if kept.get("weight") == 1]
    assert weighted == generated

    rows, _ = export(chat_group([messages], [mask.rstrip(".")]), format="prompt-completion")
    by_trainers = "".join(trained_by_a_trainer(tokenizer, row["prompt"], row["completion"]) for row in rows)
    assert [turn for row in rows for turn in row["completion"]] == [
        {"content": None, **messages[at]} for at in generated
    ]

    segments = TemplateRenderer(tokenizer).segments(messages, generated=generated)
    ours = "".join(segment.text for segment in segments if segment.is_trained)
    assert ours == by_trainers
    if len(generated) == len([m for m in messages if m["role"] == "assistant"]):
        rows, report = export(chat_group([messages]), format="tokens", tokenizer=tokenizer.name_or_path)
        assert report.rerendered == 1
        assert tokenizer.decode([label for label in rows[0]["labels"] if label != -100]) == ours
