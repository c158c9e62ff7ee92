"""The pages as a person sees them: a headless Chromium, keys and clicks; skipped where there is none."""

import json
import re
import threading
from urllib.parse import parse_qs

import pytest

from atroposlib.frontend.run_view import FileRollouts
from tests.frontend.attacks import ATTACKS
from tests.frontend.browser import CHROMIUM, served
from tests.frontend.sample_runs import write_run

pytest.importorskip("playwright", reason="needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / "a", items=28, size=4, steps=(1, 2)), write_run(folder / "b", items=12, size=3, seed=1)]


@pytest.fixture(scope="module")
def view(runs):
    with served(*runs) as (address, _):
        yield address


def shown(page):
    """What the page's address says."""
    return {name: values[0] for name, values in parse_qs(page.url.partition("#")[2]).items()}


def line(group):
    return int(group.rpartition(":")[2])


def until(page, expression, arg=None):
    """Wait until an expression, or a function of `arg`, is true; the page's policy forbids playwright's own way."""
    for _ in range(500):
        if page.evaluate(expression, arg):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never true: {expression} of {arg}; the page's address is {page.url}")


def until_address(page, **wanted):
    """Wait until the address says so; None: says nothing of it."""
    until(
        page,
        "wanted => Object.entries(wanted).every(([k, v]) => new URLSearchParams(location.hash.slice(1)).get(k) === v)",
        arg=wanted,
    )


def test_keys_lead_through_groups_answers_search_and_help(open_page, view):
    page = open_page(view)
    first = shown(page)["group"]
    assert line(first) == 1
    page.keyboard.press("j")
    page.keyboard.press("j")
    until_address(page, group=first.removesuffix(":1") + ":3")
    page.keyboard.press("k")
    until_address(page, group=first.removesuffix(":1") + ":2")
    page.wait_for_selector(".detail-head a:text-matches(':2$')")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    until_address(page, response="1")
    assert page.locator("article.chosen").get_attribute("data-response") == "1"
    page.keyboard.press("ArrowLeft")
    until_address(page, response="0")
    page.keyboard.press("?")
    assert "next group" in page.locator("dialog[open]").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    page.keyboard.press("/")
    page.keyboard.type("gdańsk")
    until_address(page, text="gdańsk")
    until(page, "!document.querySelector('#list-head').textContent.startsWith('68')")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    until(page, "document.querySelector('#detail-pane').textContent.includes('Gdańsk')")
    page.click("#chips button")
    until_address(page, text=None)
    assert page.input_value("#search") == ""


def test_the_first_answer_comes_with_the_page(open_page, view):
    asked = []

    def note(request):
        asked.append(request.url.removeprefix(view).partition("?")[0])

    page = open_page("about:blank", settled="")
    page.on("request", note)
    open_page(view)
    page.remove_listener("request", note)
    assert "viewer/main.js" in asked
    assert not {"api/groups", "api/group"} & set(asked)


def test_the_list_continues_behind_its_page(open_page, view):
    page = open_page(view + "#offset=0")
    page.click("#pages button[title='next page']")
    until(page, "document.querySelector('#pages').textContent.includes('2 of 2')")
    page.locator("#list button").last.click()
    page.locator("#list button.chosen").wait_for()
    last = shown(page)["group"]
    page.keyboard.press("j")
    assert shown(page)["group"] == last


def test_an_address_opens_group_answer_and_token_and_back_goes_back(open_page, view):
    start = open_page(view)
    group = shown(start)["group"].removesuffix(":1") + ":55"
    page = open_page(f"{view}#group={group}&response=2&token=40&colour=logprob", settled=".tok.chosen")
    assert page.locator(".tok.chosen").get_attribute("data-at") == "40"
    assert "inference_logprobs" in page.locator("article.chosen .token-facts").inner_text()
    page.wait_for_selector("#list button.chosen")  # on the second page of the list
    until(page, "!document.querySelector('.tokens').classList.contains('ids')")
    page.locator("article[data-response='1'] .tok").nth(12).click()
    until_address(page, response="1", token="12")
    page.select_option("label:has-text('task') select", "sums")
    until_address(page, task="sums")
    page.go_back()
    until_address(page, task=None)


def test_tokens_are_coloured_by_everything_that_is_recorded(open_page, view):
    page = open_page(view)
    options = page.locator(".detail-head select option").all_inner_texts()
    assert options == [
        *("text", "tokens: loss", "tokens: log-probability", "tokens: engine-trainer gap"),
        *("tokens: rank of entropies", "tokens: DPO side"),
    ]
    for colour, marked in {
        "mask": ".tok.masked",
        "logprob": ".tok.s2",
        "gap": ".tok.s1",
        "rank:entropies": ".tok.s5",
        "side": ".tok.side-chosen",
    }.items():
        page.select_option(".detail-head select", colour)
        page.wait_for_selector(marked)
    page.keyboard.press("t")
    until(page, "document.querySelector('.message') && !document.querySelector('.tok')")


def test_prompts_stand_once_thoughts_are_folded_calls_results_and_verdicts_are_shown(open_page, view):
    page = open_page(view + "#task=weather")
    assert page.locator(".prompt").count() == 1
    assert page.locator(".prompt .message").count() == 2
    assert page.locator("article[data-response='0'] .call code").inner_text() == "weather"
    assert '"celsius"' in page.locator("article[data-response='0'] .result").inner_text()
    assert page.locator("article[data-response='0'] .facts").inner_text().startswith("verdict")
    thinking = page.locator("article[data-response='0'] .thinking")
    assert not thinking.evaluate("each => each.open")
    page.keyboard.press("f")
    page.wait_for_selector(".thinking[open]")
    page.keyboard.press("f")
    page.keyboard.press("c")
    page.wait_for_selector(".answers.columns")
    tops = page.locator("article[data-response]").evaluate_all("all => all.map(each => each.offsetTop)")
    assert len(set(tops)) == 1
    page.keyboard.press("c")


def test_a_bar_filters_by_what_it_shows(open_page, view):
    page = open_page(view)
    bar = page.locator("figure:has-text('completion tokens') .bar").first
    count = int(bar.get_attribute("aria-label").rpartition(": ")[2].split()[0])
    bar.click()
    until(page, "document.querySelectorAll('#chips button').length === 3")
    until(page, "count => document.querySelector('#list-head').textContent.includes(`, ${count} of`)", arg=count)
    page.click("#chips button:has-text('clear all')")
    page.click(".task-rates button:has-text('proofs')")
    until_address(page, task="proofs", min_tokens=None)


def test_bars_of_few_values_stand_over_them_and_what_is_not_recorded_has_no_filter(open_page, view, hostile):
    page = open_page(view)
    centres = "all => all.map(e => { const r = e.getBoundingClientRect(); return Math.round(r.x + r.width / 2); })"
    scores = page.locator("figure:has(figcaption:text-is('score'))")
    names = scores.locator("svg > text:not(:last-of-type)")
    assert names.all_text_contents() == ["0", "0.5", "1"]
    bars = scores.locator(".bar rect:not(.hit)")
    assert bars.evaluate_all(centres) == pytest.approx(names.evaluate_all(centres), abs=1)
    assert page.locator("#filters label:has-text('gap')").is_visible()
    with served(hostile) as (address, _):
        page = open_page(address)
        page.locator(".task-rates").wait_for()
        assert not page.locator("#filters label:has-text('gap')").is_visible()


def test_a_histogram_grows_until_every_group_is_read(open_page, runs, monkeypatch):
    may_read, read, looked_at = threading.Event(), FileRollouts.read, []

    def read_later(self, *args, **kinds):
        if looked_at:  # the first look asks only whether there are gaps
            may_read.wait(60)
        looked_at.append(args)
        yield from read(self, *args, **kinds)

    monkeypatch.setattr(FileRollouts, "read", read_later)
    with served(runs[1]) as (address, _):
        page = open_page(address)
        caption = "document.querySelector('#numbers figure:nth-child(3) figcaption').textContent"
        page.locator("figcaption:text('gap, 12 groups to go')").wait_for()
        may_read.set()
        until(page, f"{caption} === 'engine-trainer gap'")
        counts = page.locator("#numbers figure:nth-child(3) .bar").evaluate_all(
            "all => all.map(each => +each.ariaLabel.split(': ')[1].split(' ')[0])"
        )
        assert sum(counts) == 36


def test_numbers_are_short_and_what_rounding_leaves_of_zero_is_zero(open_page, view):
    said = (
        "async () => { const { short } = await import('/viewer/dom.js'); return [-2e-17, -0.163, 12345].map(short); }"
    )
    assert open_page(view).evaluate(said) == ["0", "-0.163", "12,345"]


def test_filters_that_leave_nothing_say_so(open_page, view):
    page = open_page(view + "#text=no+such+words", settled="#list .quiet")
    until(page, "document.querySelector('#list').textContent === 'no group matches the filters'")
    page.click("#views button:has-text('compare')")
    until(page, "document.querySelector('#list').textContent === 'no item that the filters leave is in both'")
    assert page.locator(".verdict").inner_text() == "No item in common: A has 0 items, B has 0 items"


def test_two_runs_stand_next_to_each_other(open_page, view):
    page = open_page(view + "#view=compare&task=sums", settled="#list button")
    assert "A better on" in page.locator(".verdict").inner_text()
    assert page.input_value("label:has-text('task') select") == "sums"
    page.keyboard.press("j")
    page.wait_for_selector(".sides .side:nth-child(2) article")
    assert page.locator(".side").count() == 2
    assert shown(page)["group"] != shown(page)["other"]
    sides = page.locator("#list-head select").first.locator("option").all_inner_texts()
    assert sides == ["run:a/sample_rollouts_main", "run:b/sample_rollouts_main", "step:1", "step:2"]
    for at, side in enumerate(("step:1", "step:2")):
        page.locator("#list-head select").nth(at).select_option(side)
        until_address(page, **{("left", "right")[at]: side})
    until(page, "document.querySelectorAll('#list button').length > 8")
    page.locator("#list button").first.click()
    page.wait_for_selector(".changes td:text('engine.weight_version_end')")
    page.click("text=best answers, word by word")
    assert page.locator("mark").count() > 0


def test_failures_have_their_tracebacks(open_page, view):
    page = open_page(view + "#view=failures")
    assert not page.locator("#filter-panel").is_visible()  # it is of groups
    page.click("#list button:has-text('engine')")
    until_address(page, kind="engine")
    until(page, "document.querySelectorAll('.failure').length === 2")
    page.locator(".failure summary").first.click()
    assert "Traceback" in page.locator(".failure[open] pre").inner_text()


def test_an_export_is_of_what_is_filtered(open_page, view):
    page = open_page(view + "#task=sums&min_score=1")
    page.keyboard.press("e")
    assert "- sums" in page.locator("dialog .text").inner_text()
    assert page.locator("dialog code").inner_text() == "atropos sft ROLLOUTS --policy policy.yaml --output OUTPUT"
    with page.expect_download() as download:
        page.click("dialog a:text('rollouts.jsonl')")
    lines = download.value.path().read_text().splitlines()
    assert lines
    assert {(json.loads(each)["task"], *set(json.loads(each)["scores"])) for each in lines} == {("sums", 1.0)}


def test_an_error_is_gone_when_something_else_is_shown(open_page, view):
    page = open_page(view + "#group=none:1", settled="#list button")
    until(page, "document.getElementById('state').textContent.startsWith('there is no group none:1')")
    page.keyboard.press("j")
    until(page, "document.getElementById('state').textContent === ''")


def test_what_a_run_adds_appears_and_what_is_open_stays(open_page, tmp_path):
    path = write_run(tmp_path / "r", items=3, size=2)
    with served(path) as (address, rollouts):
        page = open_page(address)
        page.keyboard.press("j")
        until_address(page, group=f"{path.name}:2")
        with path.open("a") as stream:
            stream.write(path.read_text().splitlines()[0].replace("sample/main/0/1", "sample/main/9/1") + "\n")
        rollouts.follow([path])
        until(page, "document.querySelectorAll('#list button').length === 4")
        assert shown(page)["group"] == f"{path.name}:2"
        assert page.locator("#list button.chosen").count() == 1


def test_it_is_dark_where_the_system_is_and_the_switch_is_remembered(open_page, view):
    page = open_page(view, scheme="dark")

    def is_dark():
        found = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", found))) < 380

    assert is_dark()
    page.emulate_media(color_scheme="light")
    assert not is_dark()
    page.keyboard.press("d")
    assert is_dark()
    page.reload()
    page.wait_for_selector("article")
    assert is_dark()
    page.evaluate("localStorage.clear()")


def test_on_a_phone_list_and_group_take_turns_and_nothing_sticks_out(open_page, view):
    page = open_page(view, width=390, height=800, settled="#list button")
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    page.locator("#list button").nth(4).click()
    page.wait_for_selector("#detail-pane article >> visible=true")
    assert not page.locator("#list-pane").is_visible()
    assert page.evaluate(fits)
    page.click("text=‹ list")
    assert page.locator("#list-pane").is_visible()
    for place in ("#view=compare", "#view=failures"):
        page.goto(view + place)
        page.wait_for_selector("#list button")
        assert page.evaluate(fits)


IS_HARMLESS = """() => ({
    pwned: window.pwned, polluted: ({}).polluted, scripts: document.scripts.length,
    strange: [...document.querySelectorAll(
        'iframe,object,embed,form,base,style,math,video,body body,[onerror],[onload],[onfocus],a[href^=javascript]'
    )].map(each => each.tagName),
    images: [...document.images].map(each => each.src).filter(each => !each.startsWith('data:image/')),
})"""


def test_no_text_of_a_model_runs_or_becomes_markup(open_page, hostile):
    with served(hostile) as (address, _):
        page = open_page(address, settled=f"article[data-response='{len(ATTACKS) - 1}']")
        harmless = {"pwned": None, "polluted": None, "scripts": 3, "strange": [], "images": []}
        assert page.evaluate(IS_HARMLESS) == harmless
        words = page.evaluate(
            "[...document.querySelectorAll('article .text')].map(each => each.textContent).join('\\n')"
        )
        for name, text in ATTACKS.items():
            piece = re.split("[^\x20-\x7e]", text)[0][:200].replace("<think>", "").replace("<tool_call>", "")
            assert piece.strip() in words, name
        assert "U+202E" in words
        assert "U+0000" in words
        assert "__proto__" in page.locator("article").first.inner_text()
        page.keyboard.press("f")
        page.wait_for_selector(".thinking[open]")
        page.keyboard.press("t")
        page.wait_for_selector(".tok")
        for _ in range(3):
            page.keyboard.press("j")
        page.keyboard.press("h")
        page.click("button:text('failures')")
        page.wait_for_selector(".failure")
        page.evaluate("document.querySelectorAll('.failure').forEach(each => { each.open = true; })")
        assert page.evaluate(IS_HARMLESS) == harmless
        for text in list(ATTACKS.values())[::6]:
            page.evaluate("hash => { location.hash = hash; }", f"text={text[:60]}&task={text[:60]}&group={text[:60]}")
        until(page, "document.querySelector('#state').textContent.includes('there is no group')")
        assert page.evaluate(IS_HARMLESS) == harmless
