"""Draw the picture of docs/viewing.md: `python -m tests.frontend.picture docs/view_run.png`."""

import sys
import tempfile
from pathlib import Path

from tests.frontend.browser import chromium, served
from tests.frontend.sample_runs import write_run


def draw(picture: Path) -> None:
    """Write a screenshot of two made-up runs, one group open, its tokens coloured by log-probability."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [write_run(Path(folder) / "before"), write_run(Path(folder) / "after", seed=1)]
        with chromium() as browser, served(*runs) as (address, _):
            page = browser.new_page(viewport={"width": 1280, "height": 760})
            page.goto(address)
            page.wait_for_selector("#detail-pane article")
            page.keyboard.press("t")
            page.wait_for_selector("#detail-pane .tok")
            page.wait_for_selector("figcaption:text-is('engine-trainer gap')")  # all groups are read
            page.screenshot(path=str(picture))


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
