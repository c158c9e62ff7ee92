"""A chess engine that speaks UCI, such as Stockfish, as a program of this machine. Needs the package chess (GPL)."""

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import chess.engine  # pyright: ignore[reportMissingImports]

_TIMEOUT_S = 30.0


class UciEngine:
    """A program that speaks UCI, started when it is first asked and again when it died; one question at a time."""

    def __init__(self, program: str) -> None:
        self.program, self.lock = program, asyncio.Lock()
        self.running: tuple[asyncio.SubprocessTransport, chess.engine.UciProtocol] | None = None

    async def move(self, board: "chess.Board", nodes: int) -> "chess.Move":
        """Return its move; it forgets what it looked at before, so that the same position has the same answer.

        Raises:
            TimeoutError, chess.engine.EngineError: it gave none.
        """
        import chess.engine  # pyright: ignore[reportMissingImports]

        async with self.lock:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    protocol = self.running[1] if self.running else await self._started()
                    played = await protocol.play(board, chess.engine.Limit(nodes=nodes), game=object())
            except BaseException:
                await self.close()
                raise
        if played.move is None:
            raise chess.engine.EngineError(f"{self.program} gives no move for {board.fen()}")
        return played.move

    async def _started(self) -> "chess.engine.UciProtocol":
        import chess.engine  # pyright: ignore[reportMissingImports]

        transport, protocol = await chess.engine.popen_uci(self.program)
        self.running = (transport, protocol)
        await protocol.configure({name: 1 for name in ("Threads", "Hash") if name in protocol.options})
        return protocol

    async def close(self) -> None:
        """Kill it."""
        if self.running is not None:
            (transport, protocol), self.running = self.running, None
            transport.close()
            await asyncio.wait([protocol.returncode], timeout=_TIMEOUT_S)
