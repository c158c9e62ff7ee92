"""Addresses that no server can have are refused before anything waits for them."""

import socket

import pytest
from typer.testing import CliRunner

from atroposlib.cli import inference_node_wandb_watcher
from atroposlib.cli.boundary import command, listening
from atroposlib.errors import ConfigError, LaunchError
from atroposlib.example_trainer import fake_trainer

NO_ADDRESSES = ("ftp://x", "nonsense", "localhost:8000", "http://", "http://[::1", "http://x:port", "http://x:65536")


@pytest.fixture(autouse=True)
def nothing_is_asked(monkeypatch):
    """Where the commands would begin to wait."""
    monkeypatch.setattr(fake_trainer, "_until_stopped", lambda *_: pytest.fail("went on"))
    monkeypatch.setattr(inference_node_wandb_watcher, "wait_for_run", lambda *_: pytest.fail("went on"))


@pytest.mark.parametrize("text", NO_ADDRESSES)
@pytest.mark.parametrize(
    ("function", "flags"),
    [
        (fake_trainer.fake_trainer, ["--api-url"]),
        (inference_node_wandb_watcher.watch, ["--tp", "1", "--node_num", "0", "--api_addr"]),
    ],
    ids=["atropos-fake-trainer", "inference-node-wandb-watcher"],
)
def test_what_is_no_address_is_wrong_usage(function, flags, text):
    done = CliRunner().invoke(command(function), [*flags, text])
    assert done.exit_code == 2, done.exception
    assert "http://HOST:PORT" in done.output


@pytest.mark.parametrize("error", [socket.gaierror(socket.EAI_NONAME, "Name or service not known"), UnicodeError("x")])
def test_a_host_without_an_address_is_blamed_on_the_host(monkeypatch, error):
    def unknown(*_, **__):
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"foo\.bar\.invalid .*choose another --host"):
        listening("foo.bar.invalid", 8000)


def test_a_taken_port_is_blamed_on_the_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LaunchError, match="choose another --port"):
            listening("127.0.0.1", taken.getsockname()[1])


def test_an_address_of_another_machine_is_blamed_on_the_host():
    with pytest.raises(ConfigError, match="choose another --host"):
        listening("192.0.2.1", 0)  # set aside for documentation, nobody's
