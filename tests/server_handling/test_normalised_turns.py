"""Turns that an agent program rewrote: known again by its rule, and an edit wherever they say something else."""

import pytest
from test_agent_rollouts import ADD, HELLO, SAID, TOOLS, ask, client_of, new_rollout, record_of

from atroposlib.envs.server_handling.agents.normalise import normaliser
from atroposlib.errors import ConfigError

CODE = "I add.\n<code>\nx = 1 + 2\n</code>"
TWO = f"Both.{ADD}\n{ADD}".replace('"b": 2', '"b": 7', 1)
EDITS = {
    "as it was": (lambda said: said, True),
    "another argument": (lambda said: said.replace("'b': 2", "'b': 3"), False),
    "another tool": (lambda said: said.replace("'add'", "'sub'"), False),
    "another text": (lambda said: "No. " + said, False),
    "no call": (lambda said: said.partition("Calling tools:")[0], False),
    "calls that are cut": (lambda said: said[:-3], False),
    "no Python": (lambda said: said.replace("[{", "[{{"), False),
    "a program": (lambda said: said.partition("[{")[0] + "__import__('os').getpid()", False),
    "deep": (lambda said: said.partition("[{")[0] + "[" * 50_000, False),
}


def as_smolagents(message):
    """The turn as smolagents 1.26 sends it back: its text, and its calls sorted by id as Python writes them."""
    import json

    given = sorted(message["tool_calls"], key=lambda call: call["id"])
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.loads(call["function"]["arguments"]),
            },
        }
        for call in given
    ]
    text = message["content"].strip() + "\n" if message["content"] is not None else ""
    return f"{text}Calling tools:\n{calls}"


async def echoed(client, first, edit, **settings):
    made = await new_rollout(client, **settings)
    message = (await ask(client, made, tools=TOOLS)).json()["choices"][0]["message"]
    parts = [{"type": "text", "text": edit(first(message))}]
    history = [*HELLO, {"role": "assistant", "content": parts}, {"role": "user", "content": "Observation:\n3"}]
    reply = await ask(client, made, messages=history, tools=TOOLS)
    assert reply.status_code == 200, reply.text
    return await record_of(client, made)


@pytest.mark.parametrize("text", [SAID, ADD, TWO], ids=["with thoughts", "a call alone", "two calls"])
@pytest.mark.parametrize(("edit", "is_known"), EDITS.values(), ids=EDITS)
async def test_a_turn_that_smolagents_rewrote_continues_unless_it_says_something_else(text, edit, is_known):
    async with client_of(text, "done") as client:
        record = await echoed(client, as_smolagents, edit, normalise=["smolagents"])
        first, second = (call["calls"][0] for call in record["calls"])
        assert second["parent"] == ([0, 0] if is_known else None)
        assert record["differences"] == is_known
        if not is_known:  # what the agent sent is what the model sees
            assert (
                edit(as_smolagents(record["calls"][0]["answers"][0]["message"])).strip()[:2000]
                in client.engine.requests[1]["prompt"]
            )
        else:
            known = first["inserted"] + first["output"]
            assert client.engine.requests[1]["input_ids"][: len(known)] == known


async def test_without_the_rule_a_rewritten_turn_is_an_edit():
    async with client_of(SAID, "done") as client:
        record = await echoed(client, as_smolagents, lambda said: said)
        assert record["calls"][1]["calls"][0]["parent"] is None


CODES = {
    "stopped at the tag": (CODE, CODE, True),
    "a tag that the model did not write": (CODE.removesuffix("</code>"), CODE, False),
    "other code": (CODE, CODE.replace("2", "3"), False),
}


@pytest.mark.parametrize(("wrote", "echo", "is_known"), CODES.values(), ids=CODES)
async def test_a_turn_of_smolagents_code_agent_is_known_without_the_call_that_it_adds(wrote, echo, is_known):
    call = {"id": "call_2", "type": "function", "function": {"name": "python_interpreter", "arguments": "x = 1 + 2"}}
    async with client_of(wrote, "done") as client:
        made = await new_rollout(client, normalise=["smolagents"])
        await ask(client, made, stop=["Observation:", "Calling tools:", "</code>"])
        turn = {"role": "assistant", "content": f"{echo}\nCalling tools:\n{[call]}"}
        await ask(client, made, messages=[*HELLO, turn, {"role": "user", "content": "3"}])
        calls = (await record_of(client, made))["calls"]
        assert calls[1]["calls"][0]["parent"] == ([0, 0] if is_known else None)


def dated(day, then=()):
    return [{"role": "system", "content": f"Today is {day}."}, *HELLO, *then]


@pytest.mark.parametrize("normalise", [[], ["/Today is \\w+/"]], ids=["no pattern", "a pattern"])
async def test_a_system_prompt_that_changes_is_told_once_and_can_be_left_out_of_the_comparison(normalise):
    async with client_of("a", "b", "c") as client:
        made = await new_rollout(client, normalise=normalise)
        messages = dated("Monday")
        for day in ("Tuesday", "Friday", ""):
            message = (await ask(client, made, messages=messages)).json()["choices"][0]["message"]
            messages = dated(day, [*messages[2:], message, {"role": "user", "content": "more"}])
        record = await record_of(client, made)
        parents = [call["calls"][0]["parent"] for call in record["calls"]]
        notes = [note for call in record["calls"] for note in call["notes"]]
        if normalise:
            assert (parents, notes, record["differences"]) == ([None, [0, 0], [1, 0]], [], 2)
        else:
            assert parents == [None] * 3
            (note,) = notes
            assert "said 'Mon' before and says 'Tues' now" in note


WRONG = {
    "a word": (["smolagent"], "there is no rule 'smolagent'; there are smolagents"),
    "no pattern": (["/(/"], "no reg"),
}


@pytest.mark.parametrize(("names", "sentence"), WRONG.values(), ids=WRONG)
async def test_an_unknown_rule_is_refused_with_a_sentence(names, sentence):
    with pytest.raises(ConfigError, match="normalise"):
        normaliser(names)
    async with client_of() as client:
        reply = await client.post("/rollouts", json={"normalise": names}, headers={"Authorization": "Bearer admin"})
        assert (reply.status_code, sentence in reply.text) == (400, True)
