"""Metrics of a run and of the API, and the dashboard that shows them."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
from api.api_testing import make_group, started, uids
from prometheus_client.parser import text_string_to_metric_families
from test_status import PROGRESS, make_run

from atroposlib.api.server import create_app
from atroposlib.cli.status import status as status_command
from atroposlib.errors import ConfigError
from atroposlib.status.prometheus import serve_metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
METRIC = re.compile(r"\batropos_\w+")
ENGINE = {"name": "engine", "pid": 1, "state": "ready", "restarts": 2, "started": None}


def scrape(folder):
    """What a scrape of the run in a folder gives."""
    server = serve_metrics(folder, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=60) as response:
            return response.read().decode()
    finally:
        server.shutdown()
        server.server_close()


def samples(text):
    """Name of every sample -> its labels."""
    return {
        sample.name: set(sample.labels) for family in text_string_to_metric_families(text) for sample in family.samples
    }


@pytest.fixture
def run(tmp_path):
    """The folder of a training run."""
    folder = tmp_path / "r1"
    make_run(folder, kind="train", steps=9, services=[ENGINE], progress={**PROGRESS, "rejected_for": {"too long": 1}})
    (folder / "metrics").mkdir()
    (folder / "metrics" / "metrics.jsonl").write_text('{"step": 3, "batch/reward_mean": 0.25}\n')
    return folder


def test_a_run_says_what_it_has_done(run):
    text = scrape(run)
    assert 'atropos_run_responses_total{run="r1"} 40.0' in text
    assert 'atropos_run_wasted_tokens_total{cause="kill",run="r1"} 200.0' in text
    assert 'atropos_run_service_restarts_total{run="r1",service="engine"} 2.0' in text
    assert 'atropos_run_training{metric="batch/reward_mean",run="r1"} 0.25' in text


async def test_the_dashboard_shows_every_metric_and_none_that_does_not_exist(run):
    api = await started(create_app(), batch_size=4)
    assert (await api.post("/scored_data", json=make_group(1))).status_code == 200
    assert uids(await api.get("/batch")) == [1]
    assert (await api.post("/scored_data", json=make_group(2))).status_code == 200
    found = samples(scrape(run)) | samples((await api.get("/metrics")).text)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    targets = [target for panel in panels for target in panel["targets"]]
    used = {name for target in targets for name in METRIC.findall(target["expr"])}
    assert used <= found.keys()
    bare = re.compile("_(total|bucket|count|sum|created)$")
    assert {bare.sub("", name) for name in used} == {bare.sub("", name) for name in found}
    for target in targets:
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - {"instance"}
        labels.update(re.findall(r"(\w+)=~", target["expr"]))
        for name in METRIC.findall(target["expr"]):
            assert labels <= found[name], target


def test_a_folder_without_a_run_is_one_that_is_not_up(tmp_path):
    assert 'atropos_run_up{run="gone"} 0.0' in scrape(tmp_path / "gone")


def test_an_address_that_cannot_be_is_said(run):
    with pytest.raises(ConfigError, match="expected a port"):
        status_command(str(run), metrics="9400/metrics")
