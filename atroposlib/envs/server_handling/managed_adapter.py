"""An object shaped like `AsyncOpenAI` that talks to a managed server, for libraries that take such a client."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, NoReturn, Protocol, TypeVar

from atroposlib.envs.server_handling.conversation import Messages

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

Reply = TypeVar("Reply")


class TrackedServer(Protocol):
    """The calls of a managed server that a client makes."""

    async def chat_completion(self, *, messages: Messages, **kwargs: object) -> "ChatCompletion": ...

    async def completion(self, *, prompt: str, **kwargs: object) -> "Completion": ...


class ManagedServerAdapter:
    """`.chat.completions.create` and `.completions.create`; everything else is refused."""

    def __init__(self, managed_server: TrackedServer, base_url: str) -> None:
        self.base_url = base_url
        self.chat = _Chat(_Route(managed_server.chat_completion))
        self.completions = _Route(managed_server.completion)

    async def post(self, path: str, body: object, cast_to: type) -> NoReturn:
        """Not available: only the two routes above are tracked."""
        raise NotImplementedError(f"a managed server has no route {path!r}; use chat.completions or completions")

    def copy(self, **kwargs: object) -> NoReturn:
        """Not available: options of a client mean nothing here."""
        raise NotImplementedError("a managed server's client cannot be copied with other options")


class _Route(Generic[Reply]):
    def __init__(self, call: Callable[..., Awaitable[Reply]]) -> None:
        self._call = call

    async def create(self, **kwargs: object) -> Reply:
        """As OpenAI's `create`; `model` is the server's."""
        kwargs.pop("model", None)
        return await self._call(**kwargs)


class _Chat:
    def __init__(self, completions: "_Route[ChatCompletion]") -> None:
        self.completions = completions
