"""`atropos engine` as a process: one ready line, one sentence per refusal, a quick end."""

import socket
import subprocess
import sys
import threading

import httpx
import pytest

from tests.engines.engine_process import start_engine, stop_engine

SMALL = ("--slots", "2", "--context", "256")


def run_engine(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atroposlib.cli.engine", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_sigterm_ends_it_at_once_and_running_requests_get_what_there_is(local_model):
    process, url = start_engine(*SMALL)
    replies = []
    body = {"text": "Once", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        replies.append(next(lines))
        process.terminate()
        replies += lines
    assert '"type":"abort"' in next(line for line in reversed(replies) if line.startswith("data: {"))
    assert stop_engine(process) == 0


def test_it_ends_with_the_process_that_started_it(local_model):
    script = (
        "import subprocess, sys\n"
        "engine = [sys.executable, '-m', 'atroposlib.cli.engine']\n"
        "command = [*engine, '--port', '0', '--exit-with-parent', *sys.argv[1:]]\n"
        "engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)\n"
        "print(engine.stdout.readline(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *SMALL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    url = parent.stdout.readline().split()[2]
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    parent.kill()
    parent.communicate()
    gone = threading.Event()
    while not gone.wait(0.1):
        try:
            httpx.get(f"{url}/health", timeout=60)
        except httpx.TransportError:
            gone.set()


def test_it_starts_from_weights_that_were_trained_under_the_models_name(local_model, tmp_path):
    trained = tmp_path / "weights_00000007.gguf"
    trained.symlink_to(local_model.gguf)
    process, url = start_engine(*SMALL, "--weights", str(trained), "--weight-version", "7")
    try:
        info = httpx.get(f"{url}/model_info", timeout=30).json()
        names = [model["id"] for model in httpx.get(f"{url}/v1/models", timeout=30).json()["data"]]
        body = {"text": "Hi", "sampling_params": {"max_new_tokens": 1}}
        reply = httpx.post(f"{url}/generate", json=body, timeout=60).json()
    finally:
        stop_engine(process)
    assert (info["model_path"], names) == (str(trained), [local_model.name])
    assert (info["weight_version"], reply["meta_info"]["weight_version"]) == ("7", "7")


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (("--model", "nothing"), 1, "neither a known name"),
        (("--model", "$NO_SUCH_VARIABLE/x.gguf"), 2, "NO_SUCH_VARIABLE"),
        (("--context", "9000"), 2, "was trained for 8192 tokens"),
        (("--host", "0.0.0.0"), 2, "which others can reach"),
        (("--weights", "/no/such.gguf"), 1, "model file /no/such.gguf does not exist"),
        (("--slots", "0"), 2, "--slots"),
        (("--port", "70000"), 2, "--port"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(local_model, flags, code, sentence):
    result = run_engine("--port", "0", *flags)
    assert (result.returncode, result.stdout) == (code, "")
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_taken_port_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run_engine("--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert result.stderr.strip().endswith("is taken by another process; stop it or pass --port 0")
    assert result.stderr.count("\n") == 1
