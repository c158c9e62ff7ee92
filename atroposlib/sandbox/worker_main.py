"""The child of `sandbox.workers`: calls functions by name under a memory and a time limit.

Started as a file, so that it imports nothing but the standard library and what the called functions import. A message
is 4 bytes of length (big-endian) and JSON, over the socket that was descriptor 0; a reply repeats the `id` of its
request. Called code sees the null device there, so neither `print` nor `input` can disturb the exchange.
"""

import importlib
import json
import os
import resource
import signal
import struct
import sys
import time
from typing import BinaryIO

from atroposlib.type_definitions import JsonObject

GRACE_S = 1.0
"""Seconds after its deadline at which a worker whose parent is gone ends itself."""


def main(memory_bytes: int) -> None:
    """Answer calls until the parent closes the connection."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = take_over_stdio()
    while (request := read_message(requests)) is not None:
        # The default action of these ends the process whatever Python is doing, also when nobody is left to kill it.
        signal.setitimer(signal.ITIMER_REAL, request["longest_s"] + GRACE_S)
        signal.setitimer(signal.ITIMER_PROF, request["timeout_s"] + GRACE_S)
        reply = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply |= {"id": request["id"], "retire": uses_too_much(memory_bytes)}
        write_message(replies, reply)


def answer(request: JsonObject) -> JsonObject:
    """`value`, `out_of_memory`, or `error` with the text of whatever the function raises, SystemExit included."""
    started = time.monotonic()
    module, _, function = request["function"].partition(":")
    try:
        value = getattr(importlib.import_module(module), function)(*request["args"])
        json.dumps(value, allow_nan=False)
        return {"value": value}
    except MemoryError:
        return {"out_of_memory": True}
    except BaseException as error:
        took_s = time.monotonic() - started
        return {"error": f"{type(error).__name__}: {str(error)[:500]} (after {took_s:.1f} s)"}


def uses_too_much(memory_bytes: int) -> bool:
    """More than half of the limit is in use: the next call deserves a fresh process. Linux only; else False."""
    try:
        with open("/proc/self/statm") as stream:
            pages = int(stream.read().split()[1])
    except OSError:
        return False
    return pages * resource.getpagesize() > memory_bytes // 2


def take_over_stdio() -> tuple[BinaryIO, BinaryIO]:
    """The exchange's own files; 0, 1 and 2 become the null device."""
    connection = os.dup(0)
    requests, replies = os.fdopen(connection, "rb"), os.fdopen(connection, "wb", closefd=False)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    return requests, replies


def read_message(stream: BinaryIO) -> JsonObject | None:
    """The next message, or None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack(">I", head)
    return json.loads(stream.read(length))


def write_message(stream: BinaryIO, message: JsonObject) -> None:
    """Send one message."""
    body = json.dumps(message).encode()
    stream.write(struct.pack(">I", len(body)) + body)
    stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
