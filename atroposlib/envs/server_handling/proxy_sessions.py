"""Sessions of the managed-server proxy: each tracks the sequences of one rollout, and expires when nobody uses it."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atroposlib.envs.server_handling.agents.rollouts import Rollout, RolloutSettings
from atroposlib.envs.server_handling.managed_server import ManagedServer, SequenceNode
from atroposlib.envs.server_handling.server_baseline import Server
from atroposlib.envs.server_handling.server_manager import count_lease, pick_server
from atroposlib.envs.server_handling.tool_formats import tool_format
from atroposlib.errors import RequestFault
from atroposlib.type_definitions import Tokenizer

SESSION_TIMEOUT_S = 3600.0


class UnknownSessionError(LookupError):
    """No session has this id: never created, deleted, or expired."""


@dataclass
class SessionState:
    """One session. Times are seconds since the epoch."""

    uuid: str
    managed_server: ManagedServer
    model_name: str
    tool_parser: str
    base_url: str | None
    created_at: float
    last_accessed: float
    rollout: Rollout
    requests: int = 0  # being answered now, except for those of the model

    def num_nodes(self) -> int:
        """Sequences tracked so far."""
        return len(self.nodes())

    def nodes(self) -> list[SequenceNode]:
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
        self,
        server: Server,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        tool_parser: str,
        track_tree: bool,
        reasoning_parser: str | None = None,
    ) -> SessionState:
        """A new session on `server`; ConfigError for an unknown tool parser."""
        self._expire()
        now, name = self._clock(), str(uuid.uuid4())
        tool_format(tool_parser)
        managed = ManagedServer(
            server, tokenizer, track_tree=track_tree, tool_parser=tool_parser, reasoning_parser=reasoning_parser
        )
        settings = RolloutSettings.of(rollout_id=name, tool_parser=tool_parser, locked=False)
        session = SessionState(
            uuid=name,
            managed_server=managed,
            rollout=Rollout(settings, managed, key=name, session_model=model_name),
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

    def rollout(self, session_uuid: str) -> Rollout:
        """The rollout of a session, which does not expire while a request of it runs.

        Raises:
            UnknownSessionError: there is none of that id.
        """
        with self.using(session_uuid) as session:
            return session.rollout

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
            if session.requests == 0 and not session.rollout.is_busy and session.last_accessed < oldest:
                self.delete(session.uuid)


def choose_server(servers: list[Server], base_url: str | None) -> Server:
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


def base_url_of(server: Server) -> str | None:
    """Address of a server; scripted ones have none."""
    return getattr(server.config, "base_url", None)


def _root(base_url: str | None) -> str:
    return (base_url or "").rstrip("/").removesuffix("/v1")
