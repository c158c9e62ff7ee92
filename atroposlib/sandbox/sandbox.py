"""Runs programs that nobody trusts, each in a fresh sandbox.

sandbox = Sandbox()                                    # SandboxError where this machine cannot hold a program
outcome = await sandbox.call(["python3", "main.py"], files={"main.py": source}, stdin=b"1 2\\n")
outcome.verdict, outcome.exit_code, outcome.stdout
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict, Unpack

from atroposlib.sandbox.host import require_host
from atroposlib.sandbox.programs import Limits, Outcome, Program
from atroposlib.sandbox.workers import awaited


class Given(TypedDict, total=False):
    """Given to a program, see `Program`."""

    files: Mapping[str, bytes | str] | None
    stdin: bytes | Path
    keep: Sequence[str]
    limits: Limits | None


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

    async def call(self, command: Sequence[str], **given: Unpack[Given]) -> Outcome:
        """Run a program to its end; a cancelled call kills it.

        Raises:
            SandboxError: the sandbox itself failed.
            ValueError: a path leads out of /work.
        """
        program = Program(self._tools, command, readable=self._readable, **given)
        return await awaited(self._threads.submit(program.to_end), program.cancel)

    def run(self, command: Sequence[str], **given: Unpack[Given]) -> Outcome:
        """Do what `call` does, and block until then."""
        program = Program(self._tools, command, readable=self._readable, **given)
        return self._threads.submit(program.to_end).result()

    def close(self) -> None:
        """Wait for the programs that run; none outlives its limits."""
        self._threads.shutdown()
