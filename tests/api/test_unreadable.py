"""A disk that does not answer now: nothing is dropped, and whoever asks again gets everything."""

import errno
import os

import pytest
from api_testing import make_group, started, uids

from atroposlib.api import segments
from atroposlib.api.server import ApiSettings, create_app


@pytest.fixture
async def run(tmp_path):
    """A stored run with two full batches: (app, client)."""
    app = create_app(ApiSettings(state_dir=tmp_path / "state"))
    client = await started(app)
    for uid in range(4):
        assert (await client.post("/scored_data", json=make_group(uid))).status_code == 200
    yield app, client
    await app.state.service.store.close()


@pytest.mark.parametrize("lease", ["", "?lease_s=600"], ids=["plain", "leased"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM], ids=errno.errorcode.get)
async def test_groups_that_cannot_be_read_now_stay_and_the_trainer_is_told_to_come_again(run, monkeypatch, code, lease):
    _, client = run

    def refuse(*args, **options):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(segments, "open", refuse, raising=False)
        for _ in range(3):
            answer = await client.get(f"/batch{lease}")
            assert (answer.status_code, answer.json()["batch"]) == (503, None)
            assert os.strerror(code) in answer.json()["detail"]
            assert "retry-after" in answer.headers
    assert (await client.get("/status")).json()["current_step"] == 0
    assert [uids(await client.get(f"/batch{lease}")) for _ in range(3)] == [[0, 1], [2, 3], None]
    assert (await client.get("/status")).json()["current_step"] == 2


async def test_a_disk_that_is_away_takes_no_groups_with_it(run):
    app, client = run
    folder = app.state.service.store.folder
    folder.rename(folder.with_name("away"))
    assert (await client.get("/batch")).status_code == 503
    folder.with_name("away").rename(folder)
    assert uids(await client.get("/batch")) == [0, 1]


async def test_a_group_whose_file_is_gone_is_dropped(run, monkeypatch):
    _, client = run

    def without_the_first(path, *args, **options):
        monkeypatch.undo()
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(segments, "open", without_the_first, raising=False)
    assert uids(await client.get("/batch")) == [1, 2]
