"""Sessions of the managed-server proxy: each tracks the sequences of one rollout, and expires when nobody uses it."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_manager import count_lease, pick_server
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.errors import RequestFault

SESSION_TIMEOUT_S = 3600.0


class UnknownSessionError(LookupError):
    """No session has this id: never created, deleted, or expired."""


@dataclass
class SessionState:
    """One session. Times are seconds since the epoch."""

    uuid: str
    managed_server: ManagedServer
    translator: ToolCallTranslator
    model_name: str
    tool_parser: str
    base_url: str | None
    created_at: float
    last_accessed: float
    requests: int = 0  # being answered now

    def num_nodes(self) -> int:
        """Sequences tracked so far."""
        return len(self.nodes())

    def nodes(self) -> list[Any]:
        """The tracked sequences; in tree mode every intermediate one."""
        state = self.managed_server.get_state()
        return state["nodes"] if "nodes" in state else list(state["sequences"].values())


class Sessions:
    """All sessions. One without a request for `timeout_s` is dropped; none while a request runs.

    Expiry is looked at whenever sessions are used or counted, so no timer runs.
    """

    def __init__(self, timeout_s: float = SESSION_TIMEOUT_S, clock: Callable[[], float] = time.time) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._sessions: dict[str, SessionState] = {}

    def create(
        self, server: Any, tokenizer: Any, *, model_name: str, tool_parser: str, track_tree: bool
    ) -> SessionState:
        """A new session on `server`; ConfigError for an unknown tool parser."""
        self._expire()
        now = self._clock()
        session = SessionState(
            uuid=str(uuid.uuid4()),
            managed_server=ManagedServer(server, tokenizer, track_tree=track_tree, tool_parser=tool_parser),
            translator=ToolCallTranslator(tokenizer, tool_parser),
            model_name=model_name,
            tool_parser=tool_parser,
            base_url=base_url_of(server),
            created_at=now,
            last_accessed=now,
        )
        self._sessions[session.uuid] = session
        count_lease(server, "train", 1)
        return session

    @contextmanager
    def using(self, session_uuid: str) -> Iterator[SessionState]:
        """The session, which does not expire meanwhile.

        Raises:
            UnknownSessionError: there is none of that id.
        """
        self._expire()
        session = self._find(session_uuid)
        session.requests += 1
        try:
            yield session
        finally:
            session.requests -= 1
            session.last_accessed = self._clock()

    def delete(self, session_uuid: str) -> None:
        """Forget a session; UnknownSessionError when there is none of that id."""
        managed_server = self._find(session_uuid).managed_server
        managed_server.reset()
        count_lease(managed_server.server, "train", -1)
        del self._sessions[session_uuid]

    def all(self) -> list[SessionState]:
        """Every session that has not expired."""
        self._expire()
        return list(self._sessions.values())

    def _find(self, session_uuid: str) -> SessionState:
        if session_uuid not in self._sessions:
            raise UnknownSessionError(
                f"no session {session_uuid}; it was deleted or unused for {self.timeout_s:.0f} s: create another"
            )
        return self._sessions[session_uuid]

    def _expire(self) -> None:
        oldest = self._clock() - self.timeout_s
        for session in list(self._sessions.values()):
            if session.requests == 0 and session.last_accessed < oldest:
                self.delete(session.uuid)


def choose_server(servers: list[Any], base_url: str | None) -> Any:
    """The server at `base_url`, else the one with most free slots.

    Raises:
        RequestFault: no server, or none at that address.
    """
    if not servers:
        raise RequestFault("the proxy has no inference servers yet; POST them to /setup")
    if base_url is None:
        return pick_server(servers, "train")
    wanted = _root(base_url)
    for server in servers:
        if _root(base_url_of(server)) == wanted:
            return server
    raise RequestFault(f"no server at {base_url}; there are {[base_url_of(server) for server in servers]}")


def base_url_of(server: Any) -> str | None:
    """Address of a server; scripted ones have none."""
    return getattr(server.config, "base_url", None)


def _root(base_url: str | None) -> str:
    return (base_url or "").rstrip("/").removesuffix("/v1")
