"""A connection to an MCP server, by stdio or streamable HTTP, through the official SDK (the extra `mcp`).

    async with Session.of(command=["python", "server.py"]) as session:      # a process of its own, by stdio
        print(session.tools, await session.call("count", {"article": "lamp"}))

`{port}` in a command: the process serves streamable HTTP at a free port of loopback, /mcp. A connection is kept by a
task of its own, so that whatever becomes of it raises an EnvironmentFault where it is used, and nothing elsewhere.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

from atroposlib.errors import EnvironmentFault
from atroposlib.sandbox.keeper import end_kept, kept
from atroposlib.sandbox.workers import clean_environment
from atroposlib.type_definitions import JsonObject

START_S = 60.0
"""For a server's start: interpreters take seconds on a busy machine."""
END_S = 10.0
TERM_S = 1.0
"""Between TERM and KILL of what a server started; the SDK kills the keeper after 2 s."""


class Session:
    """One connection; the tools of the server are there once it is entered.

    Args:
        where: parameters of a process, or an address.
        name: of the server in messages.
        timeout_s: for each call; one that takes longer gives an error to whoever called.
        process: that serves the address, which ends with the session.
        reservation: of its port, closed when it has ended.
    """

    def __init__(
        self,
        where: Any,
        name: str,
        timeout_s: float,
        process: asyncio.subprocess.Process | None = None,
        reservation: socket.socket | None = None,
    ) -> None:
        self.where, self.name, self.timeout_s, self.process = where, name, timeout_s, process
        self._reservation = reservation
        self.tools: list[JsonObject] = []  # in the form of OpenAI's chat completions
        self.is_sound = True  # every call had its result in time
        self._asked: asyncio.Queue[tuple[str, JsonObject, asyncio.Future[str]] | None] = asyncio.Queue()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def of(cls, *, url: str | None, command: Sequence[str], timeout_s: float) -> "Session":
        """Return a session, not entered, with the server at an address, or with one that a command starts.

        Raises:
            EnvironmentFault: the process cannot be started, or does not listen.
        """
        if url is not None:
            return cls(url, url, timeout_s)
        if shutil.which(command[0]) is None:
            raise EnvironmentFault(f"the MCP server {' '.join(command)} failed: No such file: {command[0]}")
        if any("{port}" in word for word in command):
            return await cls._over_http(command, timeout_s)
        from mcp import StdioServerParameters  # pyright: ignore[reportMissingImports]

        program, *arguments = kept(command, grace_s=TERM_S)
        plain = clean_environment(os.environ)
        return cls(StdioServerParameters(command=program, args=arguments, env=plain), " ".join(command), timeout_s)

    @classmethod
    async def _over_http(cls, command: Sequence[str], timeout_s: float) -> "Session":
        port, reservation = _reserved_port()
        words = [word.replace("{port}", str(port)) for word in command]
        process = await asyncio.create_subprocess_exec(
            *kept(words, grace_s=TERM_S),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env=clean_environment(os.environ),
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}/mcp"
        made, ends = cls(url, url, timeout_s, process, reservation), time.monotonic() + START_S
        try:
            while process.returncode is None and time.monotonic() < ends:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    return made
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            await made._end_process()
            raise
        await made._end_process()
        raise EnvironmentFault(f"no server listens at port {port}; see what this prints: {' '.join(words)}")

    @property
    def is_open(self) -> bool:
        """True until the connection has ended."""
        return self._task is not None and not self._task.done()

    async def __aenter__(self) -> "Session":
        self._task = asyncio.create_task(self._keep())
        try:
            await asyncio.wait([self._ready, self._task], timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.__aexit__(None, None, None)
            raise
        if not self._ready.done():
            fault = self._ended(f"no answer after {START_S:.0f} s")
            await self.__aexit__(None, None, None)
            raise fault
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._asked.put_nowait(None)
            _, left = await asyncio.wait([self._task], timeout=END_S if self._ready.done() else 0)
            for task in left:
                task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end_process()

    @property
    def late(self) -> str:
        """The result of a call that takes too long."""
        return f"Error: no result after {self.timeout_s:g} s"

    async def call(self, name: str, arguments: JsonObject) -> str:
        """Return the text of a result; one that begins with "Error" where the tool failed or took too long.

        Raises:
            EnvironmentFault: the server has ended, or answers nothing at all.
        """
        assert self._task is not None
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((name, arguments, answer))
        await asyncio.wait([answer, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise self._ended("the connection has ended")
        return answer.result()

    async def _keep(self) -> None:
        """Hold the connection, and answer calls one by one; end with what ends it."""
        from mcp import Client, MCPError  # pyright: ignore[reportMissingImports]

        async with Client(self.where) as client:
            async with asyncio.timeout(START_S):
                self.tools = [_tool(tool) for tool in (await client.list_tools()).tools]
            self._ready.set_result(None)
            while (asked := await self._asked.get()) is not None:
                name, arguments, answer = asked
                try:
                    async with asyncio.timeout(self.timeout_s):
                        answer.set_result(_text(await client.call_tool(name, arguments)))
                except (MCPError, TimeoutError) as error:
                    self.is_sound = False
                    async with asyncio.timeout(self.timeout_s):  # is it the call, or the server?
                        await client.list_tools(cache_mode="bypass")
                    answer.set_result(self.late if isinstance(error, TimeoutError) else f"Error: {error}")

    def _ended(self, otherwise: str) -> EnvironmentFault:
        error = self._task.exception() if self._task and self._task.done() and not self._task.cancelled() else None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        said = f"{type(error).__name__}: {error}" if error is not None else otherwise
        return EnvironmentFault(f"the MCP server {self.name} failed: {said}")

    async def _end_process(self) -> None:
        if self.process is not None:
            await end_kept(self.process, grace_s=TERM_S)
        if self._reservation is not None:
            self._reservation.close()


def _reserved_port() -> tuple[int, socket.socket | None]:
    """Return a free port that no other session of this machine is given until the socket next to it is closed.

    Its server does not listen yet: a session with the same port would talk to whichever of the two listens first. The
    reservation is a name in Linux's abstract namespace, which ends with its process; elsewhere there is none.
    """
    from atroposlib.launch.services import free_ports

    while True:
        (port,) = free_ports(1)
        if sys.platform != "linux":
            return port, None
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0atropos-mcp-{port}")
            return port, reservation
        except OSError as error:
            reservation.close()
            if error.errno != errno.EADDRINUSE:
                raise


class SessionPool:
    """Sessions for episodes, a few at a time; used again where a tool puts the server back to its start.

    Args:
        start: gives a session that is not entered.
        reset: that tool, which has no arguments and is not shown to the model; None: a session an episode.
    """

    def __init__(self, start: Callable[[], Awaitable[Session]], at_once: int, reset: str | None) -> None:
        self._start, self._reset = start, reset
        self._at_once, self._idle = asyncio.Semaphore(at_once), list[Session]()

    async def take(self) -> Session:
        """Return a session whose server is at its start; EnvironmentFault where none can be had."""
        await self._at_once.acquire()
        try:
            while self._idle and self._reset is not None:
                session = self._idle.pop()
                with contextlib.suppress(EnvironmentFault):
                    if not (await session.call(self._reset, {})).startswith("Error"):
                        return session
                await session.__aexit__(None, None, None)
            session = await (await self._start()).__aenter__()
            session.tools = [tool for tool in session.tools if tool["function"]["name"] != self._reset]
            return session
        except BaseException:
            self._at_once.release()
            raise

    async def give(self, session: Session) -> None:
        """Take a session back; one that failed is closed."""
        try:
            if self._reset is not None and session.is_sound and session.is_open:
                self._idle.append(session)
            else:
                await session.__aexit__(None, None, None)
        finally:
            self._at_once.release()

    async def close(self) -> None:
        """Close all that are not in use."""
        while self._idle:
            await self._idle.pop().__aexit__(None, None, None)


def _tool(tool: Any) -> JsonObject:
    said = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": said}


def _text(result: Any) -> str:
    said = "\n".join(part.text for part in result.content if part.type == "text")
    return f"Error: {said}" if result.is_error else said or "(nothing)"
