"""The floor of ingest: a server that takes `bench_api.py`'s bodies into one buffer, looks at no number, and answers.

    bench_api.py --parts ingest --cmd "python tests/api/bare_server.py {port}"
    bench_api.py --parts ingest --cmd "python tests/api/bare_server.py {port} {dir}/bodies"    # each body to disk first

What it lacks besides every check: group commit, an index, and a second thread. A server with durability cannot use less
CPU than the second line shows; one that shares commits can answer more often.
"""

import asyncio
import json
import mmap
import os
import re
import sys
from pathlib import Path

from atroposlib.api.direct_io import aligned, allocate, open_for_writing, write_all

FILE_BYTES = 64 << 20
BUFFER_BYTES = 16 << 20
ENV_STATUS = {"current_step": 0, "queue_size": 0, "env_weight": 1.0, "self_queue_size": 0, "max_group_size": 1}
ENV = {"status": "success", "wandb_name": "bare", "checkpoint_dir": "", "starting_step": 0, "num_steps": 1}
ANSWERS = {"/register": {"uuid": 1}, "/status-env": ENV_STATUS, "/batch": {"batch": None}}


class Disk:
    """One file with its blocks held, written past the page cache; it begins anew at its end."""

    def __init__(self, path: Path) -> None:
        self._fd = open_for_writing(path)
        allocate(self._fd, (FILE_BYTES,))
        self._end = 0

    def write(self, buffer: mmap.mmap, length: int) -> None:
        """The first `length` bytes of the buffer are on disk when this returns."""
        if self._end + aligned(length) > FILE_BYTES:
            self._end = 0
        self._end += write_all(self._fd, buffer, aligned(length), self._end)
        os.fdatasync(self._fd)


class Bare(asyncio.BufferedProtocol):
    """One connection; requests come one after the other."""

    registered = 0

    def __init__(self, disk: Disk | None) -> None:
        self._disk = disk
        self._buffer = mmap.mmap(-1, BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._filled = self._request_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if not self._request_bytes:
            head, separator, _ = bytes(self._view[: min(self._filled, 4096)]).partition(b"\r\n\r\n")
            if not separator:
                return
            length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
            self._request_bytes = len(head) + 4 + (int(length[1]) if length else 0)
            self._path = head.split(b" ", 2)[1].decode()
        if self._filled >= self._request_bytes:
            self._answer()

    def _answer(self) -> None:
        if self._path.startswith("/scored_data") and self._disk is not None:
            self._disk.write(self._buffer, self._request_bytes)
        answer = ANSWERS.get(self._path, {"status": "received"})
        if self._path == "/register-env":
            answer = {**ENV, "env_id": Bare.registered, "checkpoint_interval": 1}
            Bare.registered += 1
        text = json.dumps(answer, separators=(",", ":")).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
        self._transport.write(head + text)
        self._filled = self._request_bytes = 0


async def serve(port: int, disk: Disk | None) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(lambda: Bare(disk), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Disk(Path(sys.argv[2])) if len(sys.argv) > 2 else None))
