"""Functions that misbehave in every way a generator or verifier can; called by name in sandbox workers."""

import contextlib
import os
import struct
import sys
import time
from pathlib import Path


def double(x: int) -> int:
    return 2 * x


OPENED: list[str] = []


def open_slowly(what: str) -> None:
    time.sleep(1)
    OPENED.append(what)


def opened() -> list[str]:
    return OPENED


def process_id() -> int:
    return os.getpid()


def process_id_when_met(folder: str, others: int) -> int:
    """Return once that many processes have come to the folder."""
    (Path(folder) / str(os.getpid())).touch()
    while len(os.listdir(folder)) < others:
        time.sleep(0.01)
    return os.getpid()


def hang() -> None:
    while True:
        time.sleep(1)


def hang_in_c() -> int:
    return len(str(9**9**9))


def eat_memory() -> int:
    return len(bytearray(8 * 2**30))


KEPT: list[bytes] = []


def keep_much_memory(_: str = "") -> int:
    KEPT.append(b"x" * (200 * 2**20))
    return len(KEPT)


def raise_error() -> None:
    raise ValueError("no such puzzle")


def exit_politely() -> None:
    sys.exit(0)


def exit_at_once() -> None:
    os._exit(7)


def crash() -> None:
    os.kill(os.getpid(), 11)


def print_junk() -> str:
    print("junk" * 100_000)
    os.write(1, b"\xff" * 1000)
    sys.stderr.write("more junk")
    return "fine"


def read_stdin() -> str:
    return sys.stdin.read()


def give_a_set() -> set[int]:
    return {1}


def start_child() -> int:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def note_and_hang(path: str) -> None:
    with open(path, "w"):
        pass
    hang()


def variables() -> list[str]:
    return list(os.environ)


def give_nan() -> float:
    return float("nan")


def write_reply(text: str) -> int:
    write_bytes(struct.pack(">I", len(text)) + text.encode())
    return 1


def write_bytes(data: bytes = b"\xff" * 8) -> None:
    """To every descriptor that takes it: one of them is the worker's."""
    for descriptor in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(descriptor, data)


def write_half_and_die() -> None:
    write_bytes(struct.pack(">I", 100) + b'{"value"')
    os._exit(3)


def _daemon() -> None:
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)


def hang_with_a_daemon() -> None:
    _daemon()
    hang()


def die_and_leave_a_child() -> None:
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os._exit(7)
