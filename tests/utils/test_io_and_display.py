import logging

import pytest

from atroposlib.utils.display import display_metrics_table
from atroposlib.utils.io import parse_http_response


class Reply:
    def __init__(self, status, body):
        self.status, self.body = status, body

    def raise_for_status(self):
        if self.status >= 400:
            raise RuntimeError(f"status {self.status}")

    async def json(self):
        if not isinstance(self.body, dict):
            raise TypeError("no JSON")
        return self.body

    async def text(self):
        return str(self.body)


async def test_a_good_reply_gives_its_json():
    assert await parse_http_response(Reply(200, {"a": 1})) == {"a": 1}


FAILURES = {"error status": (Reply(503, {"why": "full"}), RuntimeError), "no json": (Reply(200, "full"), TypeError)}


@pytest.mark.parametrize(("reply", "error"), FAILURES.values(), ids=FAILURES)
async def test_a_bad_reply_is_logged_with_its_body_and_raised(reply, error, caplog):
    with pytest.raises(error):
        await parse_http_response(reply, logging.getLogger("mine"))
    assert [record.name for record in caplog.records] == ["mine"]
    assert "full" in caplog.text


def test_metrics_are_printed_as_an_aligned_markdown_table(capsys):
    display_metrics_table("gsm8k", {"eval/percent_correct": 0.5, "length": 12, "note": "ok"}, 10.0, 12.5)
    assert capsys.readouterr().out == (
        "\nEvaluation results: gsm8k\n"
        "| Task  | Metric          |     |   Value |\n"
        "|-------|-----------------|-----|--------:|\n"
        "| gsm8k | percent correct | ↑   |  0.5000 |\n"
        "| gsm8k | length          |     | 12.0000 |\n"
        "| gsm8k | note            |     |      ok |\n"
        "Evaluation took 2.50 s\n"
    )


def test_an_evaluation_without_metrics_prints_its_time(capsys):
    display_metrics_table("empty", {}, 0.0, 1.0)
    assert "Evaluation took 1.00 s" in capsys.readouterr().out
