"""Commands of the package as processes of their own, which need not import it first: a server forks them that has.

A start takes 30 ms of CPU in place of a second. Signals, kills, exit codes, stdout and stderr are those of a process.
"""

import contextlib
import importlib
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Sequence
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        *("tests.children", "atroposlib.api.server", "atroposlib.cli.run_api", "uvicorn"),
        *("atroposlib.envs.base", "atroposlib.envs.cli", "atroposlib.cli.sft"),
    ]
)


class Child:
    """One `main` of the package in a process that ends with this one.

    Args:
        module: has a `main`, as console scripts do.
        log: gets what it says on stderr, at the end.
        files: how many it may have open; None: as many as this process.
    """

    def __init__(self, module: str, arguments: Sequence[str], log: Path, *, files: int | None = None) -> None:
        self._reader, writer = _FORKS.Pipe(duplex=False)
        given = (module, list(arguments), dict(os.environ), os.getcwd(), writer, str(log), files)
        self._process = _FORKS.Process(target=_main, args=given, daemon=True)
        self._process.start()
        writer.close()

    @cached_property
    def stdout(self) -> TextIO:
        """To be closed by whoever reads it."""
        return os.fdopen(os.dup(self._reader.fileno()))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, sign: signal.Signals) -> None:
        if self._process.exitcode is None:
            with contextlib.suppress(
                ProcessLookupError
            ):  # it has ended, and the server that forked it has yet to say so
                os.kill(self.pid, sign)

    def wait(self, timeout: float) -> int:
        """Exit code; that of a signal is negative."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return code


def _main(
    module: str, arguments: list[str], environ: dict[str, str], cwd: str, out: Connection, log: str, files: int | None
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    os.dup2(out.fileno(), 1)
    out.close()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - the one before believes that it writes to a file
    with open(log, "ab") as stream:
        os.dup2(stream.fileno(), 2)
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    sys.argv = [module.rpartition(".")[2], *arguments]
    importlib.import_module(module).main()
