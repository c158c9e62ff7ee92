"""Claude Code's and Codex's wire, played against the gateway by scripts in the form that their public sources describe.

The programs themselves are not run. Each script keeps its own history as its program does: what goes into the next
request is made of the events of the last reply alone.
"""

import json
import re
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from starlette.applications import Starlette

from atroposlib.envs.server_handling.agents.gateway import Gateway
from atroposlib.envs.server_handling.agents.rollouts import Rollouts, managed_for
from atroposlib.envs.server_handling.agents.rows import rows_of
from atroposlib.envs.server_handling.agents.settings import RolloutSettings
from atroposlib.type_definitions import IGNORE_INDEX
from tests.fakes import FakeServer
from tests.server_handling.test_agent_rollouts import Tokenizer


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Play:
    """A rollout behind a gateway in this process."""

    def __init__(self, *texts):
        self.engine = FakeServer(list(texts), tokenizer=Tokenizer())
        rollouts = Rollouts(lambda settings: managed_for(self.engine, self.engine.tokenizer, settings))
        self.rollout = rollouts.create(RolloutSettings(tool_parser="hermes", reasoning_parser="think"))
        self.app = Starlette(routes=Gateway(rollouts).model_routes())
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway")

    def prompt(self, number):
        return self.engine.tokenizer.decode(self.engine.requests[number]["input_ids"])

    def rows(self):
        """Role of each row, and the text that it learns."""
        told = []
        for row in rows_of(self.rollout):
            ids = [token for token in row.masks if token != IGNORE_INDEX]
            told.append((row.role, self.engine.tokenizer.decode(ids).replace("<|im_end|>", "|")))
        return told

    def notes(self):
        return [note for exchange in self.rollout.exchanges for note in exchange.notes]


@asynccontextmanager
async def playing(*texts):
    play = Play(*texts)
    async with play.http:
        yield play


def events_of(data):
    """Name and JSON of each server-sent event; the name is also the JSON's type."""
    events = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        found = re.fullmatch(r"event: (\S+)\ndata: (.*)", block)
        assert found is not None, block
        events.append(json.loads(found[2]))
        assert events[-1]["type"] == found[1]
    return events


# -- Claude Code ----------------------------------------------------------------------------------------------------

CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "user-agent": "claude-cli/2.1.37 (external, sdk-cli)",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
}
READ = {"name": "Read", "description": "Read a file.", "input_schema": {"type": "object", "properties": {}}}
TASK = {"name": "Task", "description": "Start an agent.", "input_schema": {"type": "object", "properties": {}}}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
ORDER = re.compile(
    r"message_start (content_block_start (content_block_delta )+content_block_stop )+message_delta message_stop"
)
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


async def claude_by_events(play, headers, body):
    """The content of a reply, put together from its events as they come."""
    reply = await play.http.post("/v1/messages?beta=true", json={**body, "stream": True}, headers=headers)
    assert reply.status_code == 200, reply.text
    events = events_of(reply.content)
    assert ORDER.fullmatch(" ".join(event["type"] for event in events))
    content, parts = [], {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(content) - 1
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                parts[event["index"]] = parts.get(event["index"], "") + delta["partial_json"]
            else:
                content[-1][DELTAS[delta["type"]]] += delta[DELTAS[delta["type"]]]
    for index, text in parts.items():
        content[index]["input"] = json.loads(text)
    usage = events[0]["message"]["usage"]
    assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, 0)
    assert usage["input_tokens"] == events[-2]["usage"]["input_tokens"] > 0
    return content


async def claude_by_anthropics_client(play, headers, body):
    """The content of a reply as Anthropic's own client puts it together."""
    anthropic, httpx2 = pytest.importorskip("anthropic"), pytest.importorskip("httpx2")
    key = headers["x-api-key"] if "x-api-key" in headers else headers["authorization"].removeprefix("Bearer ")
    given = {name: body[name] for name in ("model", "max_tokens", "messages", "system", "tools")}
    extra = {name: value for name, value in body.items() if name not in given}
    sent = {name: value for name, value in headers.items() if name not in ("x-api-key", "authorization")}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=play.app)) as http:
        sdk = anthropic.AsyncAnthropic(auth_token=key, base_url="http://gateway", http_client=http, max_retries=0)
        async with sdk.messages.stream(**given, extra_body=extra, extra_headers=sent) as stream:
            message = await stream.get_final_message()
    return [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in message.content]


CLAUDE_READERS = {"events": claude_by_events, "anthropic's client": claude_by_anthropics_client}


class ClaudeCode:
    """One conversation. The mark for the cache moves to the last block, as Claude Code moves it."""

    def __init__(self, play, read, system, tools, headers=None, *, keeps_thinking=True, bills=False):
        self.play, self.read, self.tools, self.history = play, read, tools, []
        self.headers = {**CLAUDE_HEADERS, **(headers or {"x-api-key": play.rollout.key})}
        self.system, self.keeps_thinking, self.bills = system, keeps_thinking, bills

    def body(self):
        last = self.history[-1]
        marked = {**last, "content": [*last["content"][:-1], {**last["content"][-1], **CACHED}]}
        bill = f"x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch={len(self.history)};"
        system = [{"type": "text", "text": text, **CACHED} for text in self.system]
        return {
            "model": "claude-sonnet-4-6",
            "messages": [*self.history[:-1], marked],
            "system": [*([{"type": "text", "text": bill}] if self.bills else []), *system],
            "tools": self.tools,
            "metadata": {"user_id": "user_0_account__session_1"},
            "max_tokens": 32000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
        }

    async def say(self, *blocks):
        """Send blocks of a user's turn; the blocks of the answer by their type."""
        self.history.append({"role": "user", "content": list(blocks)})
        content = await self.read(self.play, self.headers, self.body())
        kept = [block for block in content if self.keeps_thinking or block["type"] != "thinking"]
        self.history.append({"role": "assistant", "content": kept})
        return {block["type"]: block for block in content}

    async def count(self):
        body = {name: self.body()[name] for name in ("model", "messages", "system", "tools")}
        reply = await self.play.http.post("/v1/messages/count_tokens?beta=true", json=body, headers=self.headers)
        return reply.json()["input_tokens"]


def text(said):
    return {"type": "text", "text": said}


def result_of(used, said, **more):
    return {"tool_use_id": used["id"], "type": "tool_result", "content": said, **more}


SYSTEM = ["You are Claude Code, Anthropic's official CLI for Claude.", "Use the tools. Working directory: /work"]
REMINDER = text("<system-reminder>\nThe todo list is empty.\n</system-reminder>")
TITLE, LOOK, DONE = '{"title": "Fix it"}', f"<think>look</think>\n\nI read.\n{call('Read', path='a.py')}", "Fixed."
DELEGATE, GREP, FOUND = call("Task", prompt="find b"), f"\n\n{call('Read', path='b.py', limit=2)}", "b is in b.py"


async def a_session_of_claude_code(play, read, **options):
    """A title by a small model; three steps of the main conversation, with an agent of two steps between them."""
    titles = {
        "model": "claude-haiku-4-5",
        "max_tokens": 32000,
        "system": [text("Write a title of this session as JSON.")],
        "messages": [{"role": "user", "content": [text("fix it")]}],
        "tools": [],
        "temperature": 1,
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }
    main = ClaudeCode(play, read, SYSTEM, [READ, TASK, WEB_SEARCH], **options)
    (title,) = await read(play, main.headers, titles)
    assert title["text"] == TITLE
    first = await main.say(REMINDER, text("fix it"))
    assert (first["thinking"]["thinking"], first["text"]["text"]) == ("look", "\n\nI read.\n")
    assert first["tool_use"]["input"] == {"path": "a.py"}
    second = await main.say(result_of(first["tool_use"], [text("     1\timport b")]), REMINDER)
    agent = ClaudeCode(play, read, ["You are an agent for Claude Code.", "Search."], [READ])
    searched = await agent.say(text(second["tool_use"]["input"]["prompt"]))
    found = await agent.say(result_of(searched["tool_use"], "<error>no b</error>", is_error=True))
    last = await main.say(result_of(second["tool_use"], [found["text"]]))
    assert last["text"]["text"] == DONE
    return main


SESSIONS = {
    "as it is": {},
    "thinking dropped": {"keeps_thinking": False},
    "another line about billing in each request": {"bills": True},
}


@pytest.mark.parametrize("read", CLAUDE_READERS.values(), ids=CLAUDE_READERS)
@pytest.mark.parametrize("options", SESSIONS.values(), ids=SESSIONS)
async def test_a_session_of_claude_code_is_a_row_for_each_conversation_and_every_token_is_learned_once(options, read):
    async with playing(TITLE, LOOK, DELEGATE, GREP, FOUND, DONE) as play:
        await a_session_of_claude_code(play, read, **options)
    assert play.rows() == [
        ("auxiliary", ""),
        ("subagent", f"{GREP}|{FOUND}|"),
        ("main", f"{LOOK}|{DELEGATE}|{DONE}|"),
    ]
    assert "x-anthropic-billing-header" not in play.prompt(1)
    assert 'grammars are only noted: json_schema=\'{"type":"object"}\' was not used' in play.notes()
    assert "the tool 'web_search_20250305' was left out: only Anthropic's models know it" in play.notes()


@pytest.mark.parametrize("where", ["x-api-key", "authorization"])
async def test_claude_codes_count_of_a_request_is_what_the_request_takes(where):
    async with playing(LOOK) as play:
        key = play.rollout.key if where == "x-api-key" else f"Bearer {play.rollout.key}"
        main = ClaudeCode(play, claude_by_events, SYSTEM, [READ], {where: key})
        await main.say(text("fix it"))
        del main.history[-1]
        assert await main.count() == len(play.engine.requests[0]["input_ids"])


async def test_a_result_that_claude_code_clears_begins_a_branch_that_learns_only_what_is_new():
    async with playing(LOOK, DELEGATE, DONE) as play:
        main = ClaudeCode(play, claude_by_events, SYSTEM, [READ, TASK])
        first = await main.say(text("fix it"))
        second = await main.say(result_of(first["tool_use"], "a long file"))
        main.history[2] = {"role": "user", "content": [result_of(first["tool_use"], "[Old tool result cleared]")]}
        await main.say(result_of(second["tool_use"], "ok"))
    assert play.rows() == [("main", f"{LOOK}|{DELEGATE}|"), ("main", f"{DONE}|")]
    assert "a long file" not in play.prompt(2)


# -- Codex ----------------------------------------------------------------------------------------------------------

EXEC = {"type": "function", "name": "exec_command", "description": "Run.", "strict": False, "parameters": {}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": GRAMMAR}
ISSUES = {"type": "namespace", "name": "mcp__issues", "description": "", "tools": [{**EXEC, "name": "show"}]}
CODEX_TOOLS = [EXEC, PATCH, ISSUES, {"type": "web_search", "external_web_access": False}]
PATCHED = "*** Begin Patch\n*** Update File: a.py\n+import b\n*** End Patch"
ECHOED = (
    "type",
    "role",
    "content",
    "summary",
    "encrypted_content",
    "call_id",
    "name",
    "namespace",
    "arguments",
    "input",
)


async def codex_by_events(play, body):
    """The items of a reply as Codex takes them: those of `output_item.done`, until `response.completed`."""
    headers = {"authorization": f"Bearer {play.rollout.key}", "accept": "text/event-stream", "originator": "codex_exec"}
    reply = await play.http.post("/v1/responses", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    events = events_of(reply.content)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    items, opened = [], None
    for event in events[2:-1]:
        if event["type"] == "response.output_item.added":
            assert (opened, event["output_index"]) == (None, len(items))
            opened = event["item"]["id"]
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == opened
            items.append(event["item"])
            opened = None
        else:
            assert event["item_id"] == opened
    assert events[-1]["response"]["output"] == items
    usage = events[-1]["response"]["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return items


async def codex_by_openais_client(play, body):
    """The items of a reply as OpenAI's client puts them together."""
    sdk = openai.AsyncOpenAI(
        api_key=play.rollout.key, base_url="http://gateway/v1", http_client=play.http, max_retries=0
    )
    given = {name: value for name, value in body.items() if name not in ("stream", "client_metadata")}
    async with sdk.responses.stream(**given, extra_body={"client_metadata": body["client_metadata"]}) as stream:
        response = await stream.get_final_response()
    return [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]


CODEX_READERS = {"events": codex_by_events, "openai's client": codex_by_openais_client}


class Codex:
    """One thread. Nothing is stored at the server: all items are sent each time, and without their ids."""

    def __init__(self, play, read, instructions, tools=CODEX_TOOLS):
        self.play, self.read, self.instructions, self.tools, self.items = play, read, instructions, tools, []

    async def send(self, *items):
        """Items of the answer by their type."""
        self.items += items
        body = {
            "model": "gpt-5.2-codex",
            "instructions": self.instructions,
            "input": self.items,
            "tools": self.tools,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199-thread",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "1"},
        }
        answer = await self.read(self.play, body)
        self.items += [{key: item[key] for key in ECHOED if key in item} for item in answer]
        return {item["type"]: item for item in answer}


def message(role, said):
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": said}]}


def output_of(item, said):
    return {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": said}


RUN = f"<think>first look</think>I look.{call('exec_command', cmd='rg b', yield_time_ms=1000)}"
EDIT = f"<think>then edit</think>{call('apply_patch', input=PATCHED)}"
SHOW, CHECKED = call("mcp__issues.show", number=3), "All is well."


@pytest.mark.parametrize("read", CODEX_READERS.values(), ids=CODEX_READERS)
async def test_a_thread_of_codex_is_one_row_and_a_review_by_other_instructions_another(read):
    async with playing(RUN, EDIT, SHOW, "Done.", CHECKED, "More.") as play:
        codex = Codex(play, read, "You are Codex.")
        start = message("developer", "<permissions>never ask</permissions>"), message("user", "<cwd>/work</cwd>")
        first = await codex.send(*start, message("user", "fix it"))
        assert json.loads(first["function_call"]["arguments"]) == {"cmd": "rg b", "yield_time_ms": 1000}
        parts = [{"type": "input_text", "text": "Exit code: 0\nOutput:\n"}, {"type": "input_text", "text": "a.py: b"}]
        second = await codex.send(output_of(first["function_call"], parts))
        assert second["custom_tool_call"]["input"] == PATCHED
        third = await codex.send(output_of(second["custom_tool_call"], "Success. Updated a.py"))
        assert (third["function_call"]["namespace"], third["function_call"]["name"]) == ("mcp__issues", "show")
        await codex.send(output_of(third["function_call"], "closed"))
        review = Codex(play, read, "You review.", [EXEC])
        checked = await review.send(message("user", "review a.py"))
        assert checked["message"]["content"][0]["text"] == CHECKED
        await codex.send(message("user", "and then?"))
    assert play.rows() == [("subagent", f"{CHECKED}|"), ("main", f"{RUN}|{EDIT}|{SHOW}|Done.|More.|")]
    assert "<permissions>" in play.prompt(0)
    assert "the tool 'web_search' was left out: it would run at OpenAI" in play.notes()
    assert "the grammar of the tool 'apply_patch' was not used" in play.notes()


# -- what is not known ----------------------------------------------------------------------------------------------

HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
BLOCK = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
TURN = {"role": "assistant", "content": [BLOCK]}
REFUSED = {
    "a system of no objects": ("messages", {"system": ["be brief"]}, "system must be a list of objects"),
    "a choice of no object": ("messages", {"tool_choice": "auto"}, "tool_choice must be an object"),
    "a block of a tool of Anthropic": ("messages", {"messages": [*HELLO["messages"], TURN]}, "server_tool_use"),
    "a form of no object": ("messages", {"output_config": "x"}, "output_config must be an object"),
    "an item of another kind": ("responses", {"input": [{"type": "local_shell_call"}]}, "input[0] is a 'local_shell"),
    "a text of no object": ("responses", {"input": "hi", "text": "x"}, "text must be an object"),
    "a content of no parts": ("responses", {"input": [{"role": "user", "content": 3}]}, "must be a list of objects"),
    "thoughts of no parts": ("responses", {"input": [{"type": "reasoning", "summary": "x"}]}, "list of objects"),
    "a form of chat of no object": ("chat/completions", {"response_format": "x"}, "response_format must be an object"),
}


@pytest.mark.parametrize(("path", "fields", "sentence"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_read_is_refused_with_words(path, fields, sentence):
    async with playing("ok") as play:
        body = {"model": "any", **({} if path == "responses" else HELLO), **fields}
        reply = await play.http.post(f"/v1/{path}", json=body, headers={"x-api-key": play.rollout.key})
    assert reply.status_code == 400
    assert sentence in reply.json()["error"]["message"]
    assert play.rollout.exchanges == []


@pytest.mark.parametrize(("path", "given"), [("messages", HELLO), ("responses", {"input": "hi"})], ids=["M", "R"])
async def test_fields_that_nobody_knows_change_nothing(path, given):
    async with playing("ok") as play:
        body = {"model": "any", **given, "a_field_of_next_year": {"x": 1}, "service_tier": "auto", "safety": None}
        reply = await play.http.post(f"/v1/{path}", json=body, headers={"x-api-key": play.rollout.key})
    assert reply.status_code == 200
    assert set(play.engine.requests[0]) <= {"prompt", "input_ids", "max_tokens", "n", "split", "temperature"}
