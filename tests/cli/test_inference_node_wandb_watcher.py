import httpx
import pytest
from typer.testing import CliRunner

from atroposlib.cli import inference_node_wandb_watcher as watcher

API = "http://api"


class World:
    """The API and four servers, of which those in `healthy` generate."""

    def __init__(self, *, step=1, healthy=(9000,), projects=("p",)):
        self.step, self.healthy, self.projects = step, healthy, list(projects)

    def answer(self, request):
        if request.url.path == "/wandb_info":
            project = self.projects.pop(0)
            return (
                httpx.Response(503)
                if project == "down"
                else httpx.Response(200, json={"group": "g", "project": project})
            )
        if request.url.path == "/status":
            return httpx.Response(200, json={"current_step": self.step, "queue_size": 0})
        if request.url.port == 9003:
            raise httpx.ConnectError("refused")
        return httpx.Response(200 if request.url.port in self.healthy else 503)

    def client(self):
        return httpx.Client(transport=httpx.MockTransport(self.answer))


def test_every_server_of_the_node_is_asked_once():
    assert watcher.server_health(World(healthy=(9000, 9002)).client(), 2, 5) == {
        "server/server_health_5_0": 1,
        "server/server_health_5_1": 0,
        "server/server_health_5_2": 1,
        "server/server_health_5_3": 0,
    }


def test_health_is_logged_when_the_step_grows_and_only_then():
    logged = []
    client = World(step=3).client()
    log = lambda metrics, step: logged.append((metrics, step))  # noqa: E731
    assert watcher.log_once(client, API, 8, 0, 2, log) == 3
    assert watcher.log_once(client, API, 8, 0, 3, log) == 3
    assert logged == [({"server/server_health_0_0": 1}, 3)]


@pytest.mark.parametrize(("status", "body"), [(503, ""), (200, "<html>"), (200, "[]"), (200, "{}")])
def test_an_api_that_restarts_or_another_server_in_its_place_changes_nothing(status, body):
    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(status, text=body)))
    assert watcher.log_once(client, API, 8, 0, 2, pytest.fail) == 2


@pytest.mark.parametrize("project", ["p", ""])
def test_it_waits_until_a_trainer_has_registered(project):
    pauses = []
    client = World(projects=("down", None, project)).client()
    assert watcher.wait_for_run(client, API, pauses.append) == {"group": "g", "project": project}
    assert len(pauses) == 2


def test_all_three_flags_are_required():
    app = watcher.typer.Typer()
    app.command()(watcher.watch)
    for flags in ([], ["--api_addr", API], ["--api_addr", API, "--tp", "1"]):
        assert CliRunner().invoke(app, flags).exit_code == 2
