import base64
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import make_config

from atroposlib.errors import ConfigError
from atroposlib.example_trainer import weight_sync
from atroposlib.example_trainer.exports import first_link, in_the_making, replace_link, version_behind
from atroposlib.example_trainer.weight_sync import WeightSyncError, make_sync


class FakeEngine:
    """Answers every POST with `status` and `body`, and remembers what came."""

    def __init__(self):
        self.status, self.body, self.seen = 200, {"success": True}, []
        self.release = "0.33.0"
        self.failing = self.lacking = ""  # a part of the path that answers 400, or 404
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                engine.seen.append((self.path, json.loads(content) if content else None))
                status, body = engine.answer(*engine.seen[-1])
                reply = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def do_GET(self):
                reply = json.dumps({"version": engine.release, "tp_size": 2}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path, body):
        if self.failing and self.failing in path:
            return 400, {"success": False, "message": "no such folder"}
        if self.lacking and self.lacking in path:
            return 404, {"detail": "Not Found"}
        return self.reply(path, body)

    def reply(self, path, body) -> tuple[int, Any]:
        return self.status, self.body

    @property
    def paths(self):
        return [path for path, _ in self.seen]

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def engine():
    fake = FakeEngine()
    yield fake
    fake.close()


class FakePolicy:
    """Writes a marker where the weights would be."""

    @property
    def model(self):
        return self

    def save_pretrained(self, folder):
        (folder / "adapter_model.safetensors").write_bytes(b"adapter")

    def merged_state(self):
        return b"weights"

    def save_merged(self, folder):
        (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def sync_of(tiny_model, tmp_path):
    opened = []

    def make(kind, urls, **changes):
        sync = make_sync(make_config(tiny_model, tmp_path, weight_sync=kind, engine_urls=urls, **changes), tmp_path)
        opened.append(sync)
        return sync

    yield make
    for sync in opened:
        sync.close()


class FakeSGLang(FakeEngine):
    """Busy for a while: the update waits, and the cache is not flushed; an update that flushes would end it."""

    def __init__(self, refusals=0):
        super().__init__()
        self.refusals = refusals
        self.idle = threading.Event()

    def reply(self, path, body):
        if path == "/update_weights_from_disk":
            assert body["flush_cache"] is False
            self.idle.wait(60)
        elif path.startswith("/flush_cache"):
            if self.refusals:
                self.refusals -= 1
                return 400, {"error": "Timed out waiting for idle state."}
            self.idle.set()
        return 200, {"success": True}


def test_sglang_is_drained_by_the_update_itself_and_flushed_while_requests_wait(sync_of, tmp_path):
    engine = FakeSGLang(refusals=2)
    sync_of("sglang", [engine.url]).push(FakePolicy(), 3)
    engine.close()
    folder = str(tmp_path / "engine" / "weights_00000003")
    assert engine.seen[0] == (
        "/update_weights_from_disk",
        {"model_path": folder, "weight_version": "3", "flush_cache": False},
    )
    assert engine.paths[1:] == ["/flush_cache?timeout=1"] * 3
    assert os.listdir(folder) == ["model.safetensors"]


def test_sglang_that_could_not_flush_is_named(sync_of, engine, caplog):
    engine.failing = "flush_cache"
    sync_of("sglang", [engine.url]).push(FakePolicy(), 1)
    assert f"{engine.url} is busy and kept its prefix cache" in caplog.text


def test_sglang_that_aborts_is_flushed_while_nothing_runs(sync_of, engine):
    sync_of("sglang", [engine.url], sync_mode="abort").push(FakePolicy(), 1)
    assert engine.paths == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/flush_cache?timeout=1",
        "/continue_generation",
    ]
    assert engine.seen[0][1] == {"mode": "abort"}


def test_sglang_that_keeps_requests_is_drained_once_then_paused_and_not_flushed(sync_of, engine):
    sync = sync_of("sglang", [engine.url], sync_mode="keep")
    sync.push(FakePolicy(), 1)
    assert set(engine.paths) == {"/update_weights_from_disk", "/flush_cache?timeout=1"}  # names of an earlier run go
    engine.seen.clear()
    sync.push(FakePolicy(), 2)
    assert engine.paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert engine.seen[0][1] == {"mode": "retract"}
    assert engine.seen[1][1]["flush_cache"] is False


def test_sglang_continues_also_when_the_update_failed(sync_of, engine):
    sync = sync_of("sglang", [engine.url], sync_mode="keep")
    sync.push(FakePolicy(), 1)
    engine.failing = "update_weights"
    with pytest.raises(WeightSyncError, match="no such folder"):
        sync.push(FakePolicy(), 2)
    assert engine.paths[-1] == "/continue_generation"


@pytest.fixture
def gpu_memory(monkeypatch):
    """Stands in for a GPU's, see tests/live/test_weight_updates.py."""

    class Shared:
        copies = 0

        def __init__(self, policy, describe):
            self.places = "places" if describe is weight_sync.for_sglang else PLACES

        def copy(self, policy):
            Shared.copies += 1

    monkeypatch.setattr(weight_sync, "SharedWeights", Shared)
    return Shared


def test_sglang_gets_places_in_gpu_memory_for_each_rank_and_a_folder_only_with_a_checkpoint(
    sync_of, engine, tmp_path, gpu_memory
):
    sync = sync_of("sglang", [engine.url], sync_mode="keep", sync_from="gpu", checkpoint_interval=2)
    sync.push(FakePolicy(), 1)
    assert list(tmp_path.rglob("model.safetensors")) == []
    sync.push(FakePolicy(), 2)
    sent = [body for path, body in engine.seen if path == "/update_weights_from_tensor"]
    assert sent == [
        {"weight_version": version, "flush_cache": False, "serialized_named_tensors": ["places"] * 2}
        for version in ("1", "2")
    ]
    assert gpu_memory.copies == 2
    assert [folder.parent.name for folder in tmp_path.rglob("model.safetensors")] == ["weights_00000002"]


def test_weights_of_a_cpu_are_not_handed_over_in_gpu_memory(sync_of, engine):
    class OnCPU(FakePolicy):
        device = torch.device("cpu")

    with pytest.raises(ConfigError, match="the policy is on cpu; set sync_from to 'disk'"):
        sync_of("sglang", [engine.url], sync_from="gpu").push(OnCPU(), 1)
    assert engine.seen == []


def test_every_engine_is_updated_and_v1_is_cut_off(sync_of, engine):
    sync_of("sglang", [engine.url, engine.url + "/v1/"], sync_mode="keep").push(FakePolicy(), 1)
    assert engine.paths.count("/update_weights_from_disk") == 2


def test_no_engine_waits_until_another_is_drained(sync_of):
    engines = [FakeSGLang(), FakeSGLang()]
    engines[0].reply = lambda path, body: (200, {"success": engines[1].idle.wait(60)})  # only after the second
    sync_of("sglang", [engine.url for engine in engines]).push(FakePolicy(), 1)
    for engine in engines:
        engine.close()
    assert engines[1].paths[0] == "/update_weights_from_disk"


def test_success_false_with_status_200_is_an_error(sync_of, engine):
    engine.body = {"success": False, "message": "shape"}
    with pytest.raises(WeightSyncError, match=r"answered 200: .*shape"):
        sync_of("sglang", [engine.url]).push(FakePolicy(), 1)


def test_an_engine_that_is_not_there_is_an_error(sync_of, engine):
    engine.server.server_close()
    with pytest.raises(WeightSyncError, match="update_weights_from_disk failed"):
        sync_of("sglang", ["http://127.0.0.1:9"]).push(FakePolicy(), 1)


HANDLES = [{"gpu-0": b"from the GPU", "gpu-1": b"from the GPU"}]  # vLLM opens them with CUDA
PLACES = {
    "names": ["lm_head.weight"],
    "dtype_names": ["bfloat16"],
    "shapes": [[2, 2]],
    "ipc_handles_pickled": base64.b64encode(pickle.dumps(HANDLES)).decode(),
}


class FakeVLLM(FakeEngine):
    """Serves what the folder it was started from holds; reloads as vLLM does, and forgets prefixes when asked."""

    gpu = "gpu-1"

    def __init__(self, folder):
        super().__init__()
        self.folder, self.paused = folder, None
        self.serves = self.cached = self.read(folder)
        self.version = "default"
        self.aside: bytes | None = None  # what an open update has put away
        self.is_initialized = self.is_open = False
        self.updates = {
            "/init_weight_transfer_engine": self.initialize,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
        }

    def initialize(self, body):
        self.is_initialized = body == {"init_info": {}}
        return (200, {}) if self.is_initialized else (400, {"error": {"message": "Invalid init_info"}})

    def start(self, body):
        assert body == {}  # 0.22 parses it
        if self.is_open or not self.is_initialized or self.paused is None:
            return 500, {"error": {"message": "start_weight_update called while a weight update is already active"}}
        self.is_open = True
        if self.serves is not None:
            self.aside, self.serves = self.serves, None
        return 200, {"message": "Weight update started"}

    def update(self, body):
        """As the workers of 0.26 to 0.33: what they cannot use ends the update, but leaves the layers empty."""
        assert self.is_open is True, self.is_open
        info = body["update_info"]
        assert info.keys() == {"names", "dtype_names", "shapes", "ipc_handles_pickled"}
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        assert len(info["names"]) == len(info["dtype_names"]) == len(info["shapes"]) == len(handles)
        if self.gpu not in handles[0]:
            self.is_open = False
            return 500, {"error": {"message": f"IPC handle not found for GPU UUID {self.gpu}"}}
        self.serves = handles[0][self.gpu]
        return 200, {"message": "Weights updated"}

    def finish(self, body):
        if not self.is_open:
            return 500, {"error": {"message": "finish_weight_update called without a matching start"}}
        self.is_open = False
        if self.serves is None:
            self.serves = self.aside
        return 200, {"message": "Weight update finished"}

    def read(self, folder):
        return (folder / "model.safetensors").read_bytes()

    def reply(self, path, body):
        route, _, query = path.partition("?")
        if route == "/pause":
            self.paused = query
        elif route == "/resume":
            self.paused = None
        elif route == "/reset_prefix_cache":
            self.cached = self.serves
            return 200, {"success": query == "reset_running_requests=true"}
        elif route == "/update_weight_version":
            self.version = body["new_version"]
        elif route in self.updates:
            return self.updates[route](body)
        elif route == "/collective_rpc":
            if self.paused is None or body["method"] != "reload_weights":
                return 500, {"error": "not the moment"}
            self.serves = self.read(Path(body["kwargs"]["weights_path"]))
        return 200, {}


@pytest.fixture
def vllm(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"first")
    fake = FakeVLLM(first_link(tmp_path / "engine", tmp_path / "model"))
    yield fake
    fake.close()


def test_vllm_serves_the_new_weights_and_names_them(sync_of, vllm, tmp_path):
    assert vllm.serves == b"first"
    sync_of("vllm", [vllm.url]).push(FakePolicy(), 1)
    assert vllm.paths[0] == "/pause?mode=wait"
    assert (vllm.serves, vllm.cached, vllm.version, vllm.paused) == (b"weights", b"weights", "1", None)
    assert vllm.read(tmp_path / "engine" / "current") == b"weights"  # what a restarted one would load


PAUSES = {"drain": "wait", "abort": "abort", "keep": "keep"}


@pytest.mark.parametrize("mode", PAUSES)
def test_the_sync_mode_says_what_vllm_does_with_running_requests(sync_of, vllm, mode):
    sync_of("vllm", [vllm.url], sync_mode=mode).push(FakePolicy(), 1)
    assert vllm.paths[0].endswith(f"mode={PAUSES[mode]}")


def test_a_vllm_that_cannot_name_versions_is_updated_all_the_same(sync_of, vllm):
    vllm.lacking = "/update_weight_version"
    sync_of("vllm", [vllm.url]).push(FakePolicy(), 1)
    assert (vllm.serves, vllm.version) == (b"weights", "default")


def test_a_vllm_that_cannot_pause_as_asked_is_refused(sync_of, vllm):
    vllm.release = "0.15.1"
    with pytest.raises(WeightSyncError, match=r"is vLLM 0\.15\.1, which cannot take weights while requests run"):
        sync_of("vllm", [vllm.url]).push(FakePolicy(), 1)
    assert vllm.paths == []


def test_a_vllm_that_does_not_reload_is_an_error_and_continues(sync_of, vllm):
    vllm.failing = "collective_rpc"
    with pytest.raises(WeightSyncError, match="collective_rpc answered 400"):
        sync_of("vllm", [vllm.url]).push(FakePolicy(), 1)
    assert (vllm.version, vllm.paused) == ("default", None)


def test_vllm_gets_places_in_gpu_memory_and_a_folder_only_with_a_checkpoint(sync_of, vllm, tmp_path, gpu_memory):
    sync = sync_of("vllm", [vllm.url], sync_mode="keep", sync_from="gpu", checkpoint_interval=2)
    sync.push(FakePolicy(), 1)
    assert vllm.paths == [
        "/pause?mode=keep",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache?reset_running_requests=true",
        "/update_weight_version",
        "/resume",
    ]
    assert (vllm.serves, vllm.cached, vllm.version, vllm.paused) == (b"from the GPU",) * 2 + ("1", None)
    assert list((tmp_path / "engine").glob("weights_*")) == []
    sync.push(FakePolicy(), 2)
    assert (gpu_memory.copies, vllm.version) == (2, "2")
    assert vllm.read(tmp_path / "engine" / "current") == b"weights"


def test_a_vllm_that_could_not_map_the_memory_has_its_weights_back_and_continues(sync_of, vllm, gpu_memory):
    vllm.gpu = "of another host"
    with pytest.raises(WeightSyncError, match=r"update_weights answered 500.*not found for GPU UUID of another host"):
        sync_of("vllm", [vllm.url], sync_from="gpu").push(FakePolicy(), 1)
    assert (vllm.serves, vllm.version, vllm.paused, vllm.is_open) == (b"first", "default", None, False)


def test_an_update_that_a_killed_trainer_left_open_at_vllm_is_ended(sync_of, vllm, gpu_memory):
    vllm.is_open, vllm.aside, vllm.serves = "with some of its weights", vllm.serves, None
    sync_of("vllm", [vllm.url], sync_from="gpu").push(FakePolicy(), 1)
    assert (vllm.serves, vllm.is_open) == (b"from the GPU", False)


def test_a_vllm_without_the_routes_for_gpu_memory_is_refused(sync_of, vllm, gpu_memory):
    vllm.release = "0.20.2"
    with pytest.raises(
        WeightSyncError, match=r"is vLLM 0\.20\.2, which cannot take weights from GPU memory; install 0"
    ):
        sync_of("vllm", [vllm.url], sync_from="gpu").push(FakePolicy(), 1)
    assert (vllm.paths, gpu_memory.copies) == ([], 0)


def test_a_lora_adapter_is_swapped_in_place_from_a_path_of_its_own(sync_of, engine, tmp_path):
    sync = sync_of("vllm_lora", [engine.url], use_lora=True)
    for version in (1, 2):
        sync.push(FakePolicy(), version)
    loads = [body for path, body in engine.seen if path == "/v1/load_lora_adapter"]
    assert [(body["lora_name"], body["load_inplace"]) for body in loads] == [("policy", True)] * 2
    assert [Path(body["lora_path"]).name for body in loads] == ["adapter_00000001", "adapter_00000002"]
    assert (tmp_path / "engine" / "current_adapter").resolve().name == "adapter_00000002"  # for one started again


def test_the_embedded_engine_can_be_started_from_what_was_pushed_last(sync_of, engine, tmp_path, monkeypatch):
    class Exporter:
        def __init__(self, template, dtype):
            assert template == Path("model.gguf")

        def write(self, state, target):
            target.write_bytes(state)

    monkeypatch.setattr("atroposlib.example_trainer.gguf_weights.GGUFExporter", Exporter)
    monkeypatch.setattr("atroposlib_engine.models.resolve_model", lambda _: SimpleNamespace(gguf=Path("model.gguf")))
    sync = sync_of("embedded", [engine.url])
    for version in range(4):
        sync.push(FakePolicy(), version)
    link = tmp_path / "engine" / "current.gguf"
    assert engine.seen[-1][1] == {"model_path": str(link.resolve()), "weight_version": "3"}
    assert (version_behind(link), link.read_bytes()) == ("3", b"weights")
    assert len(list(link.parent.glob("weights_*.gguf"))) == 2


def test_what_a_kill_left_of_an_export_is_gone_after_the_next_one(tmp_path):
    (tmp_path / ".making.weights_00000001.gguf").touch()
    for name, place in {"current.gguf": "file", "current": ".", "current_adapter": "gone"}.items():
        (tmp_path / f".making.{name}").symlink_to(tmp_path / place)
        replace_link(tmp_path / name, tmp_path)
    with in_the_making(tmp_path / "weights_00000002.gguf") as making:
        making.touch()
    assert {path.name for path in tmp_path.iterdir()} == {"current.gguf", "current", "current_adapter"}


def test_old_exports_are_deleted(sync_of, engine, tmp_path):
    sync = sync_of("sglang", [engine.url])
    for version in range(4):
        sync.push(FakePolicy(), version)
    exports = tmp_path / "engine"
    assert sorted(path.name for path in exports.glob("weights_*")) == ["weights_00000002", "weights_00000003"]


def test_copies_that_a_user_made_of_exports_are_left_alone(sync_of, engine, tmp_path):
    kept = tmp_path / "engine" / "weights_00000000_good"
    kept.mkdir(parents=True)
    sync = sync_of("sglang", [engine.url])
    for version in range(4):
        sync.push(FakePolicy(), version)
    assert kept.exists()


def test_weights_pushed_after_a_resume_outlive_those_of_the_steps_that_were_lost(sync_of, engine, tmp_path):
    for version in (3, 4, 5, 3):
        sync_of("sglang", [engine.url]).push(FakePolicy(), version)
    current = (tmp_path / "engine" / "current").resolve()  # what a restarted SGLang would load
    assert current.name == "weights_00000003"
    assert os.listdir(current) == ["model.safetensors"]


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(sys.argv[2].encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_restart_replaces_the_engine_it_started_and_ends_no_other(sync_of):
    import httpx

    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", SERVER, str(port), "{model}"]
    sync = sync_of("restart", [url], engine_command=command, engine_timeout_s=60)
    try:
        sync.push(FakePolicy(), 1)
        assert httpx.get(url).text.endswith("weights_00000001")
        sync.push(FakePolicy(), 2)
        assert httpx.get(url).text.endswith("weights_00000002")
        sync.close()
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
        assert bystander.poll() is None
    finally:
        os.killpg(bystander.pid, signal.SIGKILL)
        bystander.wait()


@pytest.mark.parametrize("kind", ["sglang", "vllm", "restart"])
def test_a_stop_waits_for_no_engine_that_hangs(tiny_model, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(weight_sync, "STOP_GRACE_S", 0.1)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{free_port() if kind == 'restart' else hanging.getsockname()[1]}"
        config = make_config(tiny_model, tmp_path, weight_sync=kind, engine_urls=[url], engine_command=command)
        sync = make_sync(config, tmp_path, lambda: True)
        with pytest.raises(WeightSyncError, match=r"engines have not answered yet|was not healthy yet"):
            sync.push(FakePolicy(), 1)
        sync.close()


def test_an_engine_that_already_answers_is_not_taken_for_the_new_one(sync_of, engine):
    sync = sync_of("restart", [engine.url], engine_command=[sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(WeightSyncError, match="already answers, by a process that this trainer did not start"):
        sync.push(FakePolicy(), 1)


def test_a_restarted_engine_that_dies_is_an_error_at_once(sync_of):
    sync = sync_of("restart", ["http://127.0.0.1:9"], engine_command=[sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(WeightSyncError, match="ended with exit code 3"):
        sync.push(FakePolicy(), 1)
