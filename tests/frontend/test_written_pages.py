"""The pages that runs leave as files, as a person sees them: `status.html` of datagen and of training, and a rollout
file's twin, opened from disk in a headless Chromium; skipped where there is none."""

import json
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from atroposlib.frontend.jsonl2html import generate_html
from atroposlib.status.page import History, Point, write_page
from atroposlib.status.runs import RunRecord, read_status
from tests.frontend.attacks import ATTACKS
from tests.frontend.browser import CHROMIUM
from tests.frontend.sample_runs import write_run

pytest.importorskip("playwright", reason="needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium")

TEXTS = [text.encode("utf-8", "replace").decode()[:2000] for text in ATTACKS.values()]  # no half pairs: they are JSON
NAMES = sorted({re.sub(r"[/\x00]", "-", text)[:60] for text in TEXTS})


def write_record(folder, *, progress, **facts):
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "name": "a run",
        "problems": 60,
        "responses": 8,
        "elapsed_s": 100.0,
        "starts": 1,
        "state": "done",
        **facts,
    }
    (folder / "run.json").write_text(RunRecord(**record).to_json())
    (folder / "progress.json").write_text(json.dumps(progress))
    return folder


def write_datagen(folder):
    """A finished run: rollouts with their twin, failures with tracebacks, a history; its page."""
    rollouts = write_run(folder / "rollouts", items=20)
    progress = {
        "groups_done": 60,
        "responses": 480,
        "accepted": 240,
        "completion_tokens": 9_000,
        "prompt_tokens": 50,
        "failures": {"verifier": 2, "engine": 1, "kill": 1},
        "tasks": {"sums": {"groups": 60, "responses": 480, "accepted": 240, "set_aside": None}},
        "outputs": {
            "rollouts": [str(rollouts)],
            "html": [str(generate_html(rollouts))],
            "tracebacks": [str(rollouts.with_name("failures.jsonl"))],
        },
    }
    status = read_status(write_record(folder, progress=progress))
    points = [(status.updated_at - 60 + 10 * n, 10 * n) for n in range(6)]
    History(points=[Point(at, n, 8 * n, 4 * n, 150 * n, n, 64) for at, n in points]).save(status.history)
    return write_page(read_status(folder))


def write_training(folder):
    write_record(folder, kind="train", steps=30, problems=0, progress={"groups_done": 9})
    steps = [
        {
            "step": step,
            "batch/reward_mean": 0.2 + step / 60,
            "batch/reward_std": 0.3,
            "train/entropy": 2 - step / 30,
            "train/kl": step / 1e3,
            "train/clip_fraction": 0.02,
            "batch/staleness_mean": 1.5,
            "batch/staleness_max": 3,
            "time/wait_s": 1.0,
            "time/train_s": 2.0,
            "time/sync_s": 0.25,
            "time/tokens_per_s": 900.0,
        }
        for step in range(30)
    ]
    samples = [{"step": 29, "score": 1.0, "prompt": "How warm is it?", "response": text} for text in TEXTS[-8:]]
    for name, rows in (("metrics", steps), ("samples", samples)):
        (folder / "metrics").mkdir(exist_ok=True)
        (folder / "metrics" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_page(read_status(folder))


def write_hostile_status(folder):
    """Every attack in every place that a model, an environment or a file's name fills."""
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text("{}\n")
    faults = [{"class": text[:80], "item_key": text, "error": text, "traceback": text, "at": 1} for text in TEXTS]
    (folder / "failures.jsonl").write_text("".join(json.dumps(fault) + "\n" for fault in faults))
    progress = {
        "failures": {text[:80]: 1 for text in TEXTS},
        "tasks": {text: {"groups": 1, "responses": 1, "accepted": 1, "set_aside": text} for text in TEXTS},
        "last_failure": faults[0],
        "waiting_for": TEXTS[2],
        "outputs": {
            **{
                f"{kind}{text}": [str(folder / name)]
                for kind, (text, name) in enumerate(zip(TEXTS, NAMES, strict=False))
            },
            "tracebacks": [str(folder / "failures.jsonl")],
        },
    }
    services = [{"name": text, "pid": 1, "state": text, "restarts": 0, "started": 5} for text in TEXTS]
    write_record(folder, name="".join(TEXTS)[:5000], last_error=TEXTS[0], services=services, progress=progress)
    return write_page(read_status(folder))


@pytest.fixture(scope="module")
def pages(tmp_path_factory, hostile):
    """Where each page lies."""
    folder = tmp_path_factory.mktemp("pages")
    datagen = write_datagen(folder / "datagen")
    return {
        "status": datagen,
        "training": write_training(folder / "training"),
        "rollouts": next((datagen.parent / "rollouts").glob("*.html")),
        "hostile status": write_hostile_status(folder / "hostile"),
        "hostile rollouts": generate_html(hostile, folder / "hostile.html"),
    }


@pytest.fixture
def shown(open_page, pages):
    """Opens one of the pages from disk."""
    return lambda name, **how: open_page(pages[name].as_uri(), settled="h1", **how)


CHARTS = """() => [...document.querySelectorAll('svg')].map(svg => {
    const box = each => {
        const { left, right, top, bottom } = each.getBoundingClientRect();
        return { left, right, top, bottom };
    };
    return { title: svg.getAttribute('aria-label'), box: box(svg),
        lines: [...svg.querySelectorAll('polyline')].map(box), dots: [...svg.querySelectorAll('circle')].map(box),
        values: [...svg.querySelectorAll('text[class^=line]')].map(each => ({ text: each.textContent, ...box(each) })),
        bars: [...svg.querySelectorAll('rect')].map(each => ({ text: each.textContent, ...box(each) })),
        legend: [...svg.querySelectorAll('tspan')].map(each => each.textContent) };
})"""


def charts_of(page):
    return {chart["title"]: chart for chart in page.evaluate(CHARTS)}


@pytest.mark.parametrize("name", ["status", "training", "hostile status"])
def test_every_link_leads_to_a_file_of_the_run(name, shown, pages):
    addresses = [urlsplit(each) for each in shown(name).locator("a").evaluate_all("all => all.map(each => each.href)")]
    assert len(addresses) > 2
    assert {address.scheme for address in addresses} == {"file"}
    missing = [path for address in addresses if not (path := Path(unquote(address.path))).exists()]
    assert [path.name for path in missing if path.name != "logs"] == []  # of a run that was never started


def test_the_link_to_the_rollouts_opens_them(shown):
    page = shown("status")
    page.click("a:text('.html')")
    page.wait_for_selector("details.group")
    page.go_back()
    page.wait_for_selector("svg")


NEWEST = {
    "status": {
        "problems recorded": ["60"],
        "tokens generated per second": ["150"],
        "slots in use": ["78.1%"],
        "accepted": ["50%", "50%"],
    },
    "training": {
        "reward": ["0.683"],
        "entropy (nats)": ["1.03"],
        "KL to the reference (nats)": ["0.029"],
        "clipped": ["2%"],
        "staleness (steps)": ["3", "1.5"],
        "seconds of a step": ["2", "1", "0.25"],
        "tokens per second of the trainer": ["900"],
    },
}


@pytest.mark.parametrize("name", NEWEST)
@pytest.mark.parametrize("width", [1280, 800, 400])
def test_the_newest_value_of_each_line_stands_at_its_right_end(name, width, shown):
    drawn = charts_of(shown(name, width=width))
    assert {title: [value["text"] for value in drawn[title]["values"]] for title in NEWEST[name]} == NEWEST[name]
    for title in NEWEST[name]:
        chart = drawn[title]
        end = max(line["right"] for line in chart["lines"])
        assert [abs((dot["left"] + dot["right"]) / 2 - end) < 3 for dot in chart["dots"]] == [True] * len(chart["dots"])
        for above, below in zip(chart["values"], [*chart["values"][1:], None], strict=True):
            assert end < above["left"] < above["right"] <= chart["box"]["right"], title
            assert below is None or above["top"] + 5 < below["top"], title


def test_histograms_hold_every_answer_and_say_what_a_bar_counts(shown):
    drawn = charts_of(shown("status"))
    for what in ("scores", "tokens"):
        chart = drawn[f"{what} of the newest answers"]
        assert sum(int(bar["text"].rpartition(": ")[2]) for bar in chart["bars"]) == 160
        assert chart["legend"][0].startswith("160, mean ")
        heights = {round(bar["bottom"] - bar["top"]): int(bar["text"].rpartition(": ")[2]) for bar in chart["bars"]}
        assert sorted(heights) == sorted(heights, key=heights.__getitem__)


def test_failures_stand_with_their_counts_and_newest_tracebacks(shown):
    page = shown("status")
    rows = page.locator("h2:text('Failures') + div tr").all_inner_texts()
    assert [row.split("\t")[:2] for row in rows] == [
        ["class", "count"],
        *(["engine", "1"], ["kill", "1"], ["verifier", "2"]),
    ]
    assert "verifier: item 2 failed" in rows[3]
    assert "env.py, line 2, in verify" in rows[3]


PAGES = ["status", "training", "rollouts", "hostile status", "hostile rollouts"]


@pytest.mark.parametrize("name", PAGES)
def test_each_page_fits_every_width_and_is_dark_where_the_system_is(name, shown):
    page = shown(name)
    for width in (1280, 800, 400):
        page.set_viewport_size({"width": width, "height": 800})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            wide, back, text = page.evaluate(
                "() => [document.documentElement.scrollWidth, ...['backgroundColor', 'color'].map("
                "each => getComputedStyle(document.body)[each].match(/[0-9]+/g).reduce((a, b) => a + +b, 0))]"
            )
            assert wide <= width, (width, scheme)
            scrolling = "all => all.filter(each => each.scrollWidth > each.clientWidth).length"
            assert page.locator(".tasks").evaluate_all(scrolling) == 0 or name == "hostile status", width
            assert (back < 150 < 500 < text) if scheme == "dark" else (text < 150 < 600 < back)


def test_all_groups_open_and_close_at_once_with_a_dot_for_each_score_and_the_prompt_once(shown):
    page = shown("rollouts")
    groups = page.locator("details.group")
    assert groups.count() == 20
    assert page.locator("details.group[open]").count() == 0
    assert page.locator("summary .dots").first.locator("i").count() == 8
    assert re.search(r"[0-8] of 8 above 0, mean ", page.locator("summary").first.inner_text())
    page.click("#expand")
    assert page.locator("details.group[open]").count() == 20
    assert page.locator(".item >> visible=true").count() == 160
    prompts = page.locator("details.group .prompt").evaluate_all(
        "all => all.map(each => each.parentElement.parentElement.id)"
    )
    assert sorted(prompts) == sorted(f"group-{number}" for number in range(20))
    page.click("#collapse")
    assert page.locator("details.group[open]").count() == 0
    page.locator("summary").nth(3).press("Enter")
    assert page.locator("details.group[open]").count() == 1


IS_HARMLESS = """() => ({
    pwned: window.pwned, polluted: ({}).polluted, scripts: document.scripts.length,
    styles: document.querySelectorAll('style').length, metas: document.querySelectorAll('meta').length,
    strange: [...document.querySelectorAll(
        'iframe,object,embed,form,base,link,math,video,img,input,body body,[onerror],[onload],[onfocus],[ontoggle]'
    )].map(each => each.tagName),
})"""


@pytest.mark.parametrize(("name", "scripts"), [("training", 0), ("hostile status", 0), ("hostile rollouts", 1)])
def test_no_text_of_a_model_runs_or_becomes_markup(name, scripts, shown):
    page = shown(name)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    harmless = {"pwned": None, "polluted": None, "scripts": scripts, "styles": 1, "metas": 3, "strange": []}
    assert page.evaluate(IS_HARMLESS) == harmless
    words = page.locator("body").inner_text()
    for text in TEXTS[-8:] if name == "training" else ("<script>window.pwned=1</script>", "<iframe srcdoc="):
        piece = re.split("[^\x20-\x7e]", text)[0][:200].strip()
        assert piece in words, piece
