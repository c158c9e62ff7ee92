"""A browser and a tab for each file of tests (their event loop must end with it), and one hostile run for all."""

import pytest

from tests.frontend.attacks import write_hostile_run
from tests.frontend.browser import chromium


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def tab(browser):
    """One page for all tests, and what its console says."""
    page = browser.new_page()
    page.set_default_timeout(10_000)
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    return page, said


@pytest.fixture
def open_page(tab):
    """Opens an address; whatever the console has said at the end of the test must be nothing."""
    page, said = tab

    def open_page(address, *, width=1200, height=800, scheme="light", settled="#detail-pane article, .failure"):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.goto("about:blank")
        page.goto(address)
        if settled:
            page.wait_for_selector(settled)
        return page

    said.clear()
    yield open_page
    assert [each for each in said if "404 (Not Found)" not in each] == []  # of groups that an address made up


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    return write_hostile_run(tmp_path_factory.mktemp("hostile"))
