"""A warning that comes with every group of a run of weeks does not fill its log."""

import errno
import io
import logging

from atroposlib import calm_log
from atroposlib.calm_log import MOST, CalmFilter


class Kept(logging.Handler):
    """Keeps what reaches it."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self.addFilter(CalmFilter())

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_of_each_kind_of_warning_some_are_shown_and_the_rest_is_counted(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(calm_log.time, "monotonic", lambda: now[0])
    logger, kept = logging.Logger("a run"), Kept()
    logger.addHandler(kept)

    def fail(item):
        logger.warning("rollout failed: item=%d", item)

    for item in range(1000):
        fail(item)
    logger.warning("another kind")
    for step in range(50):
        logger.info("batch sent: step=%d", step)
    first, rest = kept.lines[:MOST], kept.lines[MOST:]
    assert first[0] == "rollout failed: item=0"
    assert first[-1] == f"rollout failed: item={MOST - 1} (more like it are counted for a minute)"
    assert rest == ["another kind", *(f"batch sent: step={step}" for step in range(50))]

    now[0] += calm_log.WINDOW_S
    kept.lines.clear()
    fail(1000)
    fail(1001)
    assert kept.lines == [f"rollout failed: item=1000 (and {1000 - MOST} like it before)", "rollout failed: item=1001"]


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_line_that_cannot_be_written_is_lost_without_a_traceback_and_a_wrong_one_is_told(monkeypatch, capsys):
    handler = logging.StreamHandler(FullDisk())
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    calm_log.begin(logging.INFO, handler=handler)
    logger = logging.Logger("a run")
    logger.addHandler(handler)
    logger.warning("waiting for the disk")
    assert capsys.readouterr().err == ""
    logger.warning("%d groups", "some")
    assert "Logging error" in capsys.readouterr().err
