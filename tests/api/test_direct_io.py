"""File systems that know less than ext4: what is written is the same."""

import errno
import os

import pytest
from api_testing import make_group, started, uids

from atroposlib.api.server import ApiSettings, create_app


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL], ids=errno.errorcode.get)
async def test_groups_are_stored_where_blocks_cannot_be_allocated_ahead(tmp_path, monkeypatch, code):
    app = create_app(ApiSettings(state_dir=tmp_path / "state"))
    app.state.service.store._hold_reserve()
    client = await started(app)

    def unsupported(fd, offset, size):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    for uid in (1, 2):
        assert (await client.post("/scored_data", json=make_group(uid))).status_code == 200
    assert uids(await client.get("/batch")) == [1, 2]
    await app.state.service.store.close()
