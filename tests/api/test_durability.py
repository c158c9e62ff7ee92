"""Real server processes: kill -9, damaged state, SIGTERM, a second server, broken connections."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from api_testing import ENV, ServerRefused, client_of, make_group, register_run, server_process, started, uids

from atroposlib.api.server import create_app
from atroposlib.api.state_folder import StateFolder
from atroposlib.errors import ConfigError


def take_all(client: httpx.Client) -> list[int]:
    """Uids of all batches that are ready."""
    taken: list[int] = []
    while (batch := uids(client.get("/batch"))) is not None:
        taken += batch
    return taken


def test_everything_survives_kill_9(tmp_path):
    with server_process(tmp_path / "state") as server:
        with httpx.Client(base_url=server.url) as client:
            register_run(client)
            for uid in range(5):
                assert client.post("/scored_data", json=make_group(uid, group_id=f"g{uid}")).status_code == 200
            assert client.post("/scored_data", json=make_group(5, sequences=2)).json()["status"] == "buffered"
            assert uids(client.get("/batch")) == [0, 1]
            leased = client.get("/batch?lease_s=600").json()
            assert uids(leased) == [2, 3]
        server.kill()
        server.start()
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/status").json()["current_step"] == 2
            assert client.get("/info").json()["batch_size"] == 8
            assert client.get("/status-env?env_id=0").status_code == 200
            assert client.post("/scored_data", json=make_group(0, group_id="g0")).json()["duplicate"] is True
            assert client.post("/scored_data", json=make_group(6, sequences=2)).json()["buffer_size"] == 0
            assert uids(client.get("/batch")) == [4, 5, 6]
            assert client.post("/batch/ack", json={"batch_id": leased["batch_id"]}).status_code == 200
            assert take_all(client) == []


def test_a_lease_survives_a_restart_and_comes_again_when_it_ends(tmp_path):
    with server_process(tmp_path / "state") as server:
        with httpx.Client(base_url=server.url) as client:
            register_run(client)
            client.post("/scored_data_list", json=[make_group(1), make_group(2)])
            first = client.get("/batch?lease_s=0.001").json()
        server.kill()
        server.start()
        with httpx.Client(base_url=server.url) as client:
            again = client.get("/batch?lease_s=600").json()
            assert again == first
            assert client.get("/status").json()["current_step"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_a_random_moment_nothing_acknowledged_is_lost_or_doubled(tmp_path, seed):
    moment = random.Random(seed)
    with server_process(tmp_path / "state") as server:
        acknowledged, open_uids, delivered = set(), set(), Counter()

        def post(first: int) -> None:
            with httpx.Client(base_url=server.url) as client:
                for uid in range(first, first + 1000):
                    open_uids.add(uid)
                    try:
                        client.post("/scored_data", json=make_group(uid, group_id=f"{uid}")).raise_for_status()
                    except httpx.HTTPError:
                        return
                    acknowledged.add(uid)

        def take() -> None:
            with httpx.Client(base_url=server.url) as client:
                try:
                    while True:
                        delivered.update(uids(client.get("/batch")) or [])
                except httpx.HTTPError:
                    return

        with httpx.Client(base_url=server.url) as client:
            register_run(client)
        threads = [threading.Thread(target=post, args=(first,)) for first in (0, 1000, 2000)]
        threads.append(threading.Thread(target=take))
        for thread in threads:
            thread.start()
        enough = moment.randint(5, 60)
        while len(acknowledged) < enough and any(thread.is_alive() for thread in threads):
            time.sleep(moment.uniform(0.001, 0.01))
        server.kill()
        for thread in threads:
            thread.join()
        server.start()
        with httpx.Client(base_url=server.url) as client:
            for uid in open_uids:
                client.post("/scored_data", json=make_group(uid, group_id=f"{uid}")).raise_for_status()
            delivered.update(take_all(client))
            waiting = client.get("/status").json()["queue_size"]
        assert acknowledged
        assert waiting <= 1
        assert not [uid for uid, count in delivered.items() if count > 1]
        assert len(open_uids - set(delivered)) == waiting


def test_a_damaged_group_is_dropped_and_the_others_stay(tmp_path):
    state = tmp_path / "state"
    with server_process(state) as server:
        with httpx.Client(base_url=server.url) as client:
            register_run(client)
            for uid in range(4):
                client.post("/scored_data", json=make_group(uid, generation_params={"mark": f"<{uid}>"}))
        assert server.stop(signal.SIGTERM) == 0
        content = (state / "state.sqlite").read_bytes()
        (state / "state.sqlite").write_bytes(content.replace(b'"<3>"', b'"<4>"'))
        server.start()
        assert httpx.get(f"{server.url}/latest_example").json()["tokens"] == []
        with httpx.Client(base_url=server.url) as client:
            client.post("/scored_data", json=make_group(9))
            assert take_all(client) == [0, 1, 2, 9]


def refusal(state, *options) -> str:
    """Start a server that cannot start; what its log says."""
    log = state.parent / "server.log"
    log.unlink(missing_ok=True)
    with pytest.raises(ServerRefused), server_process(state, *options):
        pass
    assert "Traceback" not in log.read_text()
    return log.read_text()


@pytest.fixture
def used_folder(tmp_path):
    """A folder whose server was killed after its second batch; and what the database was before that."""
    state = tmp_path / "state"
    with server_process(state) as server:
        with httpx.Client(base_url=server.url) as client:
            register_run(client)
            client.post("/scored_data_list", json=[make_group(uid) for uid in range(4)])
            assert uids(client.get("/batch")) == [0, 1]
        assert server.stop(signal.SIGTERM) == 0
        before = (state / "state.sqlite").read_bytes()
        server.start()
        with httpx.Client(base_url=server.url) as client:
            assert uids(client.get("/batch")) == [2, 3]
            deadline = time.monotonic() + 30
            while (state / "deliveries").read_bytes()[8]:  # until the delivery is in the database, and its note gone
                assert time.monotonic() < deadline
                time.sleep(0.01)
        server.kill()
    return state, before


def test_a_state_whose_last_changes_are_gone_is_refused_with_their_number(used_folder):
    state, before = used_folder
    (state / "state.sqlite-wal").unlink()
    assert re.search(r"is [0-9]+ changes older .* --accept-older", refusal(state))
    (state / "state.sqlite").write_bytes(before)
    assert "changes older" in refusal(state)
    with server_process(state, "--accept-older") as server, httpx.Client(base_url=server.url) as client:
        assert take_all(client) == [2, 3]
    (state / "state.sqlite").unlink()
    assert "changes older" in refusal(state)
    with pytest.raises(ConfigError, match="changes older") as kept:
        StateFolder(state)
    assert [file.path for file in psutil.Process().open_files() if str(state) in file.path] == [], kept


DAMAGE = {
    "cut": lambda state: os.truncate(state / "state.sqlite", 100),
    "overwritten": lambda state: (state / "state.sqlite").write_bytes(b"hello" * 20_000),
    "another database": lambda state: other_database(state / "state.sqlite"),
}


def other_database(path):
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE meta (a)")
        other.execute("PRAGMA user_version = 77")


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_or_alien_state_is_refused_in_one_sentence(tmp_path, damage):
    state = tmp_path / "state"
    with server_process(state) as server:
        assert (
            httpx.get(f"{server.url}/health").status_code == 200
        )  # stopped before that, its WAL would hold everything
        assert server.stop(signal.SIGTERM) == 0
    damage(state)
    assert "state.sqlite" in refusal(state)


def test_a_state_of_an_earlier_version_is_refused_in_one_sentence(tmp_path):
    state = tmp_path / "state"
    (state / "segments").mkdir(parents=True)
    (state / "index.sqlite").write_bytes(b"")
    assert "earlier version" in refusal(state)
    assert sorted(path.name for path in state.iterdir()) == ["index.sqlite", "segments"]


async def test_a_state_needs_no_shared_memory_so_it_may_lie_on_a_network_disk(tmp_path):
    for _ in range(2):
        app = create_app(state_dir=tmp_path / "state")
        await client_of(app).get("/register")
        assert not list(tmp_path.rglob("*-shm"))
        await app.state.service.store.close()


def test_only_this_user_may_read_the_state(tmp_path):
    with server_process(tmp_path / "state") as server:
        with httpx.Client(base_url=server.url) as client:
            register_run(client)
            client.post("/scored_data", json=make_group(1))
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "state").iterdir()}
        assert set(modes) >= {"state.sqlite", "state.sqlite-wal", "deliveries", "lock"}
        assert set(modes.values()) == {"0o600"}
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_sigterm_writes_everything_and_exits_with_0(tmp_path):
    with server_process(tmp_path / "state") as server:
        with httpx.Client(base_url=server.url) as client:
            register_run(client)
            client.post("/scored_data", json=make_group(1))
        assert server.stop(signal.SIGTERM) == 0
        assert (tmp_path / "state/state.sqlite").stat().st_size < 1_000_000
        server.start()
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/status").json()["queue_size"] == 1


def test_consumed_groups_leave_the_disk(tmp_path):
    with server_process(tmp_path / "state") as server:
        with httpx.Client(base_url=server.url) as client:
            register_run(client)
            text = [[{"role": "user", "content": "x" * 200_000}]] * 4
            client.post("/scored_data_list", json=[make_group(uid, messages=text) for uid in (1, 2)])
            assert take_all(client) == [1, 2]
        assert server.stop(signal.SIGTERM) == 0
        assert (tmp_path / "state/state.sqlite").stat().st_size < 1_000_000


def test_a_second_server_on_the_same_folder_is_refused_with_the_first_ones_pid(tmp_path):
    with server_process(tmp_path / "state") as server:
        pid = server.pid
        with pytest.raises(ServerRefused), server_process(tmp_path / "state"):
            pass
        assert f"process id {pid}" in (tmp_path / "server.log").read_text()


@contextlib.contextmanager
def dropped_connection(url: str) -> Iterator[socket.socket]:
    """A connection that is dropped at the end, which the kernel has told the server's side when this returns."""
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as raw:
        port = f":{raw.getsockname()[1]:04X}"
        yield raw
    table, deadline = Path("/proc/net/tcp"), time.monotonic() + 60
    while table.exists() and time.monotonic() < deadline:
        if not any(line.split()[2].endswith(port) for line in table.read_text().splitlines()[1:]):
            break


def ask_and_hang_up(url: str, size: int) -> None:
    """GET /batch, read a little, and drop the connection with the rest unread."""
    with dropped_connection(url) as raw:
        raw.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
        raw.recv(size)


def test_a_batch_whose_connection_broke_comes_again_first_and_counts_once(tmp_path):
    with server_process(tmp_path / "state") as server, httpx.Client(base_url=server.url, timeout=30) as client:
        register_run(client)
        groups = [
            make_group(uid, tokens=500, messages=[[{"role": "user", "content": "x" * 500_000}]] * 4) for uid in range(4)
        ]
        for group in groups:
            client.post("/scored_data", json=group).raise_for_status()
        for _ in range(3):
            ask_and_hang_up(server.url, 1000)
        deadline = time.monotonic() + 60
        while client.get("/status").json()["current_step"] != 0:
            assert time.monotonic() < deadline
        assert take_all(client) == [0, 1, 2, 3]
        assert client.get("/status").json()["current_step"] == 2


def send_and_hang_up(url: str, path: str, content: object, read: int = 0) -> None:
    """POST, read that many bytes of the answer, and drop the connection."""
    body = json.dumps(content, separators=(",", ":")).encode()  # as httpx does
    with dropped_connection(url) as raw:
        raw.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        raw.recv(read)


def test_a_post_repeated_because_its_answer_got_lost_is_stored_once(tmp_path):
    with server_process(tmp_path / "state") as server, httpx.Client(base_url=server.url) as client:
        register_run(client)
        send_and_hang_up(server.url, "/scored_data", make_group(1), read=1)
        answer = client.post("/scored_data", json=make_group(1))
        assert answer.json() == {"status": "received", "duplicate": True}
        assert client.get("/status").json()["queue_size"] == 1


def test_equal_groups_over_a_connection_each_are_all_stored(tmp_path):
    with server_process(tmp_path / "state") as server, httpx.Client(base_url=server.url) as client:
        register_run(client)
        for _ in range(3):
            assert httpx.post(f"{server.url}/scored_data", json=make_group(1)).json() == {"status": "received"}
        two = httpx.post(f"{server.url}/scored_data_list", json=[make_group(1), make_group(1)])
        assert two.json() == {"status": "received", "groups_processed": 2}
        assert client.get("/status").json()["queue_size"] == 5


def test_a_lost_answer_explains_one_repeat(tmp_path):
    with server_process(tmp_path / "state") as server, httpx.Client(base_url=server.url) as client:
        register_run(client)
        send_and_hang_up(server.url, "/scored_data", make_group(1))
        while client.get("/status").json()["queue_size"] < 1:
            pass
        answers = [httpx.post(f"{server.url}/scored_data", json=make_group(1)).json() for _ in range(3)]
        assert answers == [{"status": "received", "duplicate": True}, {"status": "received"}, {"status": "received"}]
        assert client.get("/status").json()["queue_size"] == 3


def test_the_same_content_from_another_environment_is_another_group(tmp_path):
    with server_process(tmp_path / "state") as server, httpx.Client(base_url=server.url) as client:
        register_run(client)
        assert client.post("/register-env", json=ENV).json()["env_id"] == 1
        for env_id in (0, 1):
            with httpx.Client(base_url=server.url) as env:
                assert env.post("/scored_data", json=make_group(1, env_id=env_id)).json() == {"status": "received"}
        assert client.get("/status").json()["queue_size"] == 2


def test_a_token_is_asked_for_and_taken_in_both_forms(tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    with server_process(tmp_path / "state", "--host", "0.0.0.0", "--token-file", str(token_file)) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/status").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/status", headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert httpx.get(url.replace("http://", "http://:s3cret@") + "/status").status_code == 200
        assert httpx.get(url.replace("http://", "http://:wrong@") + "/status").status_code == 401


def test_other_machines_are_not_served_without_a_token(tmp_path, monkeypatch):
    monkeypatch.delenv("ATROPOS_API_TOKEN", raising=False)
    with pytest.raises(ServerRefused), server_process(tmp_path / "state", "--host", "0.0.0.0"):
        pass
    assert "there is no token" in (tmp_path / "server.log").read_text()


def test_environment_ids_stay_valid_over_a_restart(tmp_path):
    with server_process(tmp_path / "state") as server:
        with httpx.Client(base_url=server.url) as client:
            register_run(client)
        server.kill()
        server.start()
        with httpx.Client(base_url=server.url) as client:
            assert client.post("/scored_data", json=make_group(1, env_id=0)).status_code == 200
            assert client.post("/register-env", json=ENV).json()["wandb_name"] == "sums_1"


async def test_a_batch_whose_connection_broke_is_there_after_a_death_at_any_moment_of_taking_it_back(tmp_path):
    app = create_app(state_dir=tmp_path / "state")
    client = await started(app)
    await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    service = app.state.service
    batch = await service.batches.next()
    service.batches.log_sent(batch)()
    await service.batches.sent(batch, time.monotonic())
    assert service.run.step == 1
    taking_back = service.batches.recall(batch)
    shutil.copytree(tmp_path / "state", tmp_path / "died")
    await taking_back
    shutil.copytree(tmp_path / "state", tmp_path / "died later")
    await service.store.close()
    for folder in ("died", "died later", "state"):
        again = create_app(state_dir=tmp_path / folder)
        client = client_of(again)
        assert (await client.get("/status")).json()["current_step"] == 0
        assert uids(await client.get("/batch")) == [1, 2]
        assert (await client.get("/status")).json()["current_step"] == 1
        await again.state.service.store.close()


async def test_a_batch_is_logged_as_delivered_by_one_store_to_memory(tmp_path):
    app = create_app(state_dir=tmp_path / "state")
    client = await started(app)
    await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    service = app.state.service
    batch = await service.batches.next()
    service.batches.log_sent(batch)()
    shutil.copytree(tmp_path / "state", tmp_path / "died")
    await service.batches.sent(batch, time.monotonic())
    await service.store.close()
    again = create_app(state_dir=tmp_path / "died")
    client = client_of(again)
    assert uids(await client.get("/batch")) is None
    assert (await client.get("/status")).json()["current_step"] == 1
    await again.state.service.store.close()
