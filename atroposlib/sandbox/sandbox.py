"""Runs programs that nobody trusts, each in a fresh sandbox.

sandbox = Sandbox()                                    # SandboxError where this machine cannot hold a program
outcome = await sandbox.call(["python3", "main.py"], files={"main.py": source}, stdin=b"1 2\\n")
outcome.verdict, outcome.exit_code, outcome.stdout
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atroposlib.sandbox.host import require_host
from atroposlib.sandbox.programs import Limits, Outcome, Program


class Sandbox:
    """A few programs at the same time. Safe in threads."""

    def __init__(self, *, at_once: int = 2, readable: Sequence[Path] = ()) -> None:
        """
        Args:
            at_once: programs at the same time.
            readable: folders that every program may read, at their own paths, such as a virtual environment's.

        Raises:
            SandboxError: a layer does not hold on this machine; the message says which.
        """
        self._tools = require_host()
        self._readable = readable
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="program")

    async def call(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes | str] | None = None,
        stdin: bytes = b"",
        keep: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Outcome:
        """Run a program to its end; a cancelled call kills it. For the arguments see `Program`.

        Raises:
            SandboxError: the sandbox itself failed.
            ValueError: a path leads out of /work.
        """
        program = self._program(command, files, stdin, keep, limits)
        result = asyncio.get_running_loop().run_in_executor(self._threads, program.to_end)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            program.cancel()
            await asyncio.wait([result])
            if not result.cancelled():
                result.exception()  # nobody else will look at it
            raise

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, bytes | str] | None = None,
        stdin: bytes = b"",
        keep: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Outcome:
        """Do what `call` does, and block until then."""
        return self._threads.submit(self._program(command, files, stdin, keep, limits).to_end).result()

    def close(self) -> None:
        """Wait for the programs that run; none outlives its limits."""
        self._threads.shutdown()

    def _program(
        self,
        command: Sequence[str],
        files: Mapping[str, bytes | str] | None,
        stdin: bytes,
        keep: Sequence[str],
        limits: Limits | None,
    ) -> Program:
        return Program(
            self._tools,
            command,
            files=files,
            stdin=stdin,
            keep=keep,
            limits=limits,
            readable=self._readable,
        )
