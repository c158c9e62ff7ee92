import math
from types import SimpleNamespace

import pytest

from atroposlib.errors import RequestFault
from atroposlib.utils.force_diverse_samples import draw_without_replacement, generate_with_diverse_first_tokens


class Server:
    """Offers first tokens a, b, c and continues anything with '!'."""

    def __init__(self, offered=("a", "b", "c")):
        self.offered, self.calls = offered, []

    async def chat_completion(self, **kwargs):
        self.calls.append(kwargs)
        tops = [SimpleNamespace(token=token, logprob=math.log(1 / len(self.offered))) for token in self.offered]
        logprobs = SimpleNamespace(content=[SimpleNamespace(top_logprobs=tops)]) if kwargs.get("logprobs") else None
        return SimpleNamespace(choices=[SimpleNamespace(logprobs=logprobs, message=SimpleNamespace(content="!"))])


async def test_every_completion_starts_with_another_token():
    server = Server()
    texts = await generate_with_diverse_first_tokens(
        SimpleNamespace(server=server), [{"role": "user", "content": "hi"}], prefill="So ", n=3, max_tokens=10
    )
    assert sorted(texts) == ["a!", "b!", "c!"]
    assert sorted(call["messages"][-1]["content"] for call in server.calls[1:]) == ["So a", "So b", "So c"]
    assert {call["max_tokens"] for call in server.calls[1:]} == {9}


async def test_fewer_first_tokens_than_wanted_give_fewer_completions():
    assert len(await generate_with_diverse_first_tokens(SimpleNamespace(server=Server()), [], n=8)) == 3


async def test_an_engine_without_logprobs_is_a_request_fault():
    with pytest.raises(RequestFault, match="top_logprobs"):
        await generate_with_diverse_first_tokens(SimpleNamespace(server=Server(offered=())), [])


def test_a_low_temperature_draws_the_likeliest():
    drawn = [draw_without_replacement({"a": -1.0, "b": -2.0, "c": -3.0}, 2, temperature=0.01) for _ in range(20)]
    assert drawn == [["a", "b"]] * 20


async def test_a_completion_of_one_token_is_its_first():
    server = Server()
    texts = await generate_with_diverse_first_tokens(SimpleNamespace(server=server), [], n=3, max_tokens=1)
    assert sorted(texts) == ["a", "b", "c"]
    assert len(server.calls) == 1
