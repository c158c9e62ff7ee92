import base64
import hashlib
import json
import logging
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.frontend import jsonl2html
from atroposlib.frontend.jsonl2html import (
    MARKDOWN_CHARS,
    SHOWN_CHARS,
    create_html_for_group,
    generate_html,
    get_score_class,
    page_template,
    render_text,
)
from tests.frontend.browser import CHROMIUM, chromium

HOSTILE = {
    "script": ("<script>alert(1)</script>", "&lt;script&gt;"),
    "event handler": ('<img src=x onerror="alert(1)">', "&lt;img"),
    "think tag": ("<think>hm</think>", "&lt;think&gt;hm"),
    "script link": ("[a](javascript:alert(1))", "[a](javascript"),
    "remote image": ("![i](http://example.com/x.png)", "![i]("),
    "block html": ("<div onclick=x>\n\nb\n\n</div>", "&lt;div"),
    "fence with attributes": ('```py" onload="x\n<b>\n```', "&lt;b&gt;"),
    "long text": ("<script>" + "x" * MARKDOWN_CHARS, "&lt;script&gt;"),
}


@pytest.mark.parametrize(("text", "shown"), HOSTILE.values(), ids=HOSTILE)
def test_model_text_is_shown_not_interpreted(text, shown):
    page = render_text(text)
    assert shown in page
    for tag in ("<script", "<img", "<a ", "<div", "<think"):
        assert tag not in page


def test_roles_task_and_item_ids_are_escaped_too():
    group = {"messages": [[{"role": "<b>", "content": "hi"}]], "scores": ["<i>"], "task": "<u>"}
    page = create_html_for_group(group | {"scores": [1.5]}, 0)
    assert "&lt;b&gt;" in page
    assert "<bdi>&lt;u&gt;</bdi>" in page  # the direction of its letters ends with it
    assert 'id="group-0-item-0"' in page
    assert "Reward: 1.5" in page


def test_strings_and_lists_of_parts_are_contents_too():
    group = {
        "messages": ["plain **bold**", [{"role": "user", "content": [{"type": "text", "text": "part"}]}]],
        "scores": [1, -1],
    }
    page = create_html_for_group(group, 3)
    assert "<strong>bold</strong>" in page
    assert "part" in page
    assert "<strong>User</strong>" in page
    assert "reward-negative" in page


@pytest.mark.parametrize(("score", "css"), [(0.1, "positive"), (0, "zero"), (-2, "negative")])
def test_score_class(score, css):
    assert get_score_class(score) == f"reward-{css}"


def test_unequal_lists_end_with_the_shorter_and_empty_groups_vanish():
    assert create_html_for_group({"messages": [[], []], "scores": [1.0]}, 0).count('class="item') == 1
    assert create_html_for_group({"messages": None, "scores": [1.0]}, 0) == ""
    assert create_html_for_group({"messages": [], "scores": []}, 0) == ""


def test_of_a_huge_text_the_middle_is_left_out():
    page = render_text("a" * SHOWN_CHARS + "b" * 1000)
    assert "1000 characters are not shown" in page
    assert len(page) < SHOWN_CHARS + 1000


def test_a_file_becomes_a_page_and_bad_lines_are_skipped_with_a_warning(tmp_path, caplog):
    source = tmp_path / "x_rollouts_main_0001.jsonl"
    line = json.dumps({"messages": [[{"role": "user", "content": "q"}]], "scores": [1.0]})
    source.write_text(f"{line}\nnot json\n{line}\n")
    with caplog.at_level(logging.WARNING):
        page = generate_html(source)
    text = page.read_text()
    assert page == tmp_path / "x_rollouts_main_0001.html"
    assert text.count("<details") == 2
    assert f"{source}:2" in caplog.text
    assert "<title>Rendered Messages - x_rollouts_main_0001.jsonl</title>" in text
    assert "{title}" not in text
    assert list(tmp_path.glob(".*")) == []


def test_a_file_without_groups_says_so(tmp_path):
    source = tmp_path / "r.jsonl"
    source.write_text("")
    assert "no groups with messages and scores" in generate_html(source).read_text()


def test_a_missing_input_exits_with_1(tmp_path):
    with pytest.raises(SystemExit) as caught:
        generate_html(tmp_path / "none.jsonl")
    assert caught.value.code == 1


def test_module_runs_from_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.jsonl").write_text('{"messages": ["hello"], "scores": [0.0]}\n')
    monkeypatch.setattr(sys, "argv", ["jsonl2html", str(tmp_path / "a.jsonl"), str(tmp_path / "o.html")])
    jsonl2html.main()
    assert capsys.readouterr().out.strip() == str(tmp_path / "o.html")
    assert "hello" in (tmp_path / "o.html").read_text()


@given(text=st.text(st.sampled_from("abß12 .,:;-+=()'\"%$/\n*_#<&"), max_size=30))
@settings(max_examples=400, deadline=None)
def test_plain_text_looks_as_markdown_would_make_it(text):
    assert render_text(text) == jsonl2html._markdown().reset().convert(text)


@pytest.mark.parametrize("mark", ["- ", "* ", "1. "])
def test_a_model_that_repeats_a_list_mark_for_ever_is_shown_and_spoils_no_other_text(mark):
    text = mark * 2500 + "x"
    assert render_text(text) == f"<pre>{text}</pre>"
    assert render_text("- a\n- b") == "<ul>\n<li>a</li>\n<li>b</li>\n</ul>"


ODD_LINES = [
    '{"messages": ["m"], "scores": ["a"]}',
    '{"messages": 3, "scores": [1]}',
]


@pytest.mark.parametrize("line", ODD_LINES)
def test_a_group_without_numbers_for_scores_costs_only_itself(tmp_path, caplog, line):
    source = tmp_path / "o.jsonl"
    source.write_text('{"messages": ["m"], "scores": [true]}\n' + line + "\n")
    assert generate_html(source).read_text().count("<details") == 1
    assert "set aside: 1 (no group: 1)" in caplog.text


def test_nothing_of_a_message_is_left_out():
    call = {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    asked = {"role": "user", "content": parts, "name": "ada"}
    answer = {"role": "assistant", "content": "", "reasoning_content": "hm & so", "tool_calls": [call], "extra": 7}
    result = {"role": "tool", "tool_call_id": "c1", "content": None}
    page = create_html_for_group({"messages": [[asked, answer, result]], "scores": [1.0]}, 0)
    for shown in ("look", "data:x", "ada", "hm &amp; so", "weather", "Bonn", "c1", "extra", "7", "tool_call_id"):
        assert shown in page, shown


SCORES = {
    "each kind": ([1.0, 0, -0.5, None], ["positive", "zero", "negative", "none"], "1 of 4 above 0, mean 0.167"),
    "rounding": ([0.1] * 10 + [-1], [*["positive"] * 10, "negative"], "10 of 11 above 0, mean 0"),
    "one": ([True], ["positive"], "1 of 1 above 0"),
    "not a number": ([float("nan"), 2], ["none", "positive"], "1 of 2 above 0"),
    "more than are drawn": ([1.0] * 500, ["positive"] * jsonl2html.MOST_DOTS, "500 of 500 above 0, mean 1"),
}


@pytest.mark.parametrize(("scores", "dots", "counts"), SCORES.values(), ids=SCORES)
def test_the_line_of_a_group_has_a_dot_for_each_score_and_counts(scores, dots, counts):
    line = create_html_for_group({"messages": ["m"] * len(scores), "scores": scores}, 0).partition("</summary>")[0]
    assert re.findall(r'<i class="reward-(\w+)" title="[^"]+"></i>', line) == dots
    assert line.endswith(f"<small>{counts}</small>")


def chat(*contents):
    return [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(contents)]


PROMPTS = {
    "the same question": ([chat("ask", "one"), chat("ask", "two")], 1),
    "examples before it": ([chat("ex", "shown", "ask", "one"), chat("ex", "shown", "ask", "two")], 3),
    "equal answers": ([chat("ask", "one"), chat("ask", "one")], 1),
    "different questions": ([chat("ask", "one"), chat("say", "two")], 0),
    "one response": ([chat("ask", "one", "more", "two")], 0),
    "texts": (["ask one", "ask two"], 0),
    "nothing that was said": ([3, None], 0),
    "a text among chats": ([chat("ask", "one"), "ask two"], 0),
}


@pytest.mark.parametrize(("messages", "shared"), PROMPTS.values(), ids=PROMPTS)
def test_what_all_responses_of_a_group_begin_with_stands_once(messages, shared):
    page = create_html_for_group({"messages": messages, "scores": [1.0] * len(messages)}, 0)
    prompt = re.findall(r'<div class="prompt">(.*?)</div>', page, re.DOTALL)
    assert [part.count("<strong>") for part in prompt] == [shared] * bool(shared)
    said = shared + sum(len(each) - shared for each in messages if isinstance(each, list))
    assert page.count("<strong>") == said


def test_the_only_script_that_may_run_is_the_one_of_the_template():
    (script,) = re.findall(r"<script>(.*?)</script>", page_template(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert f'http-equiv="Content-Security-Policy" content="{policy}"' in page_template()


@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium")
def test_from_disk_all_groups_open_and_close_and_nothing_runs_or_sticks_out(tmp_path):
    pytest.importorskip("playwright", reason="needs playwright")
    texts = [
        "<script>window.pwned=1</script>",
        "<img src=x onerror=window.pwned=1>",
        "x" * 9000,
        "| a | b |\n|---|---|\n" * 30,
    ]
    lines = [{"messages": [chat(text, text), chat(text, "a")], "scores": [1.0, 0.0], "task": text} for text in texts]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with chromium() as browser:
        page, asked = browser.new_page(viewport={"width": 400, "height": 800}), []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(generate_html(source).as_uri())
        for button, opened in (("Expand all", len(lines)), ("Collapse all", 0)):
            page.get_by_role("button", name=button).click()
            assert page.locator("details.group[open]").count() == opened
        page.get_by_role("button", name="Expand all").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.evaluate("window.pwned") is None
        assert len(asked) == 1
