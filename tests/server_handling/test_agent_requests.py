"""Requests of agents: images, grammars and fields that are not theirs to set, in every dialect."""

import asyncio
import contextlib
import json

import httpx
import jinja2
import pytest
from starlette.requests import ClientDisconnect
from test_agent_rollouts import ADMIN, HELLO, SlowServer, Tokenizer, ask, client_of, new_rollout, record_of

from atroposlib.envs.agent_env import GatewayService
from atroposlib.envs.server_handling.agents import gateway as gateway_module
from atroposlib.envs.server_handling.agents import rollouts as rollouts_module
from atroposlib.envs.server_handling.agents.dialect import grammar_of
from atroposlib.envs.server_handling.agents.record import CallLog
from atroposlib.envs.server_handling.agents.rollouts import BUDGET_TEXT, Rollouts, managed_for
from atroposlib.envs.server_handling.agents.settings import MOST_BLANKS, RolloutSettings, grammar_of_calls
from atroposlib.envs.server_handling.conversation import ChatRequest
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.tool_formats import tool_format
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from tests.fakes import FakeServer

URL = "data:image/png;base64,AAAA"
IMAGES = {
    "chat": ("chat/completions", "messages", [{"type": "image_url", "image_url": {"url": URL}}]),
    "chat, audio": ("chat/completions", "messages", [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]),
    "chat, a file": ("chat/completions", "messages", [{"type": "file", "file": {"file_id": "f"}}]),
    "responses": ("responses", "input", [{"type": "input_image", "image_url": URL}]),
    "responses, a file": ("responses", "input", [{"type": "input_file", "file_id": "f"}]),
    "messages": ("messages", "messages", [{"type": "image", "source": {"type": "base64", "data": "AAAA"}}]),
    "messages, a document": ("messages", "messages", [{"type": "document", "source": {"type": "text", "data": "a"}}]),
    "messages, of a tool": (
        "messages",
        "messages",
        [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]}],
    ),
    "count_tokens": ("messages/count_tokens", "messages", [{"type": "image", "source": {}}]),
}


@pytest.mark.parametrize("with_text", [False, True], ids=["alone", "behind text"])
@pytest.mark.parametrize(("path", "name", "parts"), IMAGES.values(), ids=IMAGES)
async def test_what_is_no_text_is_refused_with_a_sentence_and_nothing_is_generated(path, name, parts, with_text):
    text = {"type": "input_text" if path == "responses" else "text", "text": "What is this?"}
    async with client_of("a") as client:
        made = await new_rollout(client)
        content = [text, *parts] if with_text else parts
        reply = await ask(client, made, path, **{name: [{"role": "user", "content": content}]}, max_tokens=9)
        record = await record_of(client, made)
    assert reply.status_code == 400
    assert "the model takes text only" in reply.text
    assert repr(parts[-1].get("content", parts)[-1]["type"]) in reply.json()["error"]["message"]
    assert (record["calls"], client.engine.answered) == ([], 0)


# -- grammars -------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT, ANY = json.dumps(SCHEMA, separators=(",", ":")), '{"type":"object"}'
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
ASK = {"chat/completions": {"messages": HELLO}, "completions": {"prompt": "p"}, "responses": {"input": "hi"}}
ASK |= {"messages": {"messages": HELLO, "max_tokens": 9}}
GRAMMARS = {
    "chat": ("chat/completions", {"response_format": NAMED}, {"json_schema": TEXT}),
    "chat, any object": ("chat/completions", {"response_format": {"type": "json_object"}}, {"json_schema": ANY}),
    "chat, text": ("chat/completions", {"response_format": {"type": "text"}}, {}),
    "completions": ("completions", {"response_format": NAMED}, {"json_schema": TEXT}),
    "responses": (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {"json_schema": TEXT},
    ),
    "messages": (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"json_schema": TEXT},
    ),
    "SGLang's regex": ("chat/completions", {"regex": "a+"}, {"regex": "a+"}),
    "SGLang's ebnf": ("chat/completions", {"ebnf": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
    "guided_json": ("chat/completions", {"guided_json": SCHEMA}, {"json_schema": TEXT}),
    "guided_regex": ("chat/completions", {"guided_regex": "a+"}, {"regex": "a+"}),
    "guided_grammar": ("completions", {"guided_grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
    "guided_choice": ("chat/completions", {"guided_choice": ["a.", "b"]}, {"regex": r"(a\.)|(b)"}),
    "structured_outputs": ("chat/completions", {"structured_outputs": {"json": TEXT}}, {"json_schema": TEXT}),
}


@pytest.mark.parametrize("is_bound", [False, True], ids=["noted", "bound"])
@pytest.mark.parametrize(("path", "asked", "sent"), GRAMMARS.values(), ids=GRAMMARS)
async def test_a_grammar_reaches_the_engine_by_one_name_or_is_noted(path, asked, sent, is_bound):
    async with client_of("a") as client:
        made = await new_rollout(client, grammars=is_bound, locked=is_bound)
        reply = await ask(client, made, path, **ASK[path], **asked)
        (call,) = (await record_of(client, made))["calls"]
    assert reply.status_code == 200, reply.text
    names = {"json_schema", "regex", "ebnf", "structural_tag", "guided_json", "guided_regex", "structured_outputs"}
    used = {key: value for key, value in client.engine.requests[0].items() if key in names}
    assert used == (sent if is_bound else {})
    assert [name for name in sent if any(name in note for note in call["notes"])] == ([] if is_bound else [*sent])


REFUSED = {
    "two": ({"regex": "a", "guided_json": SCHEMA}, "a reply can have one grammar, not 2"),
    "an unknown form": ({"response_format": {"type": "yaml"}}, "cannot have the form 'yaml'"),
    "no schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}, "must be an object"),
    "an unknown kind": ({"structured_outputs": {"jason": 1}}, "structured_outputs has 'jason'"),
}


@pytest.mark.parametrize(("asked", "sentence"), REFUSED.values(), ids=REFUSED)
async def test_a_grammar_that_is_not_understood_is_refused(asked, sentence):
    async with client_of("a") as client:
        reply = await ask(client, await new_rollout(client), **asked)
    assert (reply.status_code, sentence in reply.text) == (400, True)


def function(name, **more):
    return {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA, **more}}


STRICT_TOOLS = {
    "chat/completions": [function("f", strict=True), function("g")],
    "responses": [
        {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True},
        {"type": "function", "name": "g", "parameters": SCHEMA},
    ],
    "messages": [{"name": "f", "input_schema": SCHEMA, "strict": True}, {"name": "g", "input_schema": SCHEMA}],
}


@pytest.mark.parametrize("settings", [{}, {"grammars": True}, {"grammars": True, "tool_parser": "llama3"}], ids=str)
@pytest.mark.parametrize(("path", "tools"), STRICT_TOOLS.items(), ids=STRICT_TOOLS)
async def test_strict_tools_bind_the_arguments_where_grammars_do(path, tools, settings):
    async with client_of("a") as client:
        made = await new_rollout(client, **settings)
        reply = await ask(client, made, path, **ASK[path], tools=tools)
        (call,) = (await record_of(client, made))["calls"]
    assert reply.status_code == 200, reply.text
    assert call["asked"]["strict"] == ["f", "g"]
    tag = client.engine.requests[0].get("structural_tag")
    if settings != {"grammars": True}:
        assert tag is None
        assert bool(call["notes"]) == bool(settings)
        return
    tags = [call_of("f", SCHEMA), call_of("g", {"type": "object"})]
    wanted = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, "stop_after_first": False}
    assert json.loads(tag) == {"type": "structural_tag", "format": wanted}


def call_of(name, schema):
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_BLANKS}
    begin = '<tool_call>\n{"name": "' + name + '", "arguments": '
    return {"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"}


MUST_CALL = {
    "chat/completions": ("required", {"type": "function", "function": {"name": "f"}}),
    "responses": ("required", {"type": "function", "name": "f"}),
    "messages": ({"type": "any"}, {"type": "tool", "name": "f"}),
}


@pytest.mark.parametrize("is_named", [False, True], ids=["required", "named"])
@pytest.mark.parametrize(("path", "choices"), MUST_CALL.items(), ids=MUST_CALL)
async def test_a_strict_tool_that_must_be_called_binds_the_reply_from_its_first_token(path, choices, is_named):
    async with client_of('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>') as client:
        made = await new_rollout(client, grammars=True)
        reply = await ask(client, made, path, **ASK[path], tools=STRICT_TOOLS[path], tool_choice=choices[is_named])
    assert reply.status_code == 200, reply.text
    (request,) = client.engine.requests
    f, g = call_of("f", SCHEMA), call_of("g", {"type": "object"})
    wanted = {"type": "or", "elements": [f] if is_named else [f, g]}
    assert json.loads(request["structural_tag"]) == {"type": "structural_tag", "format": wanted}


@pytest.mark.parametrize("grammars", [False, True])
@pytest.mark.parametrize("parser", ["pythonic", "gpt-oss"])
@pytest.mark.parametrize("is_named", [False, True], ids=["required", "named"])
@pytest.mark.parametrize(("path", "choices"), MUST_CALL.items(), ids=MUST_CALL)
async def test_a_call_that_must_be_made_and_cannot_be_begun_is_refused_with_a_sentence(
    path, choices, is_named, parser, grammars
):
    async with client_of("It rains.") as client:
        made = await new_rollout(client, grammars=grammars, tool_parser=parser)
        reply = await ask(client, made, path, **ASK[path], tools=STRICT_TOOLS[path], tool_choice=choices[is_named])
    what = "call 'f'" if is_named else "call a tool"
    sentence = f"must {what}, but it called none, and none can be begun for it as {parser} writes them; leave"
    assert (reply.status_code, sentence in reply.text) == (400, True)
    (request,) = client.engine.requests
    assert ("structural_tag" in request) == (grammars and parser == "gpt-oss")


ONE_CALL = {
    "chat/completions": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}


@pytest.mark.parametrize("settings", [{}, {"locked": False}, {"grammars": True}], ids=str)
@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "any arguments"])
@pytest.mark.parametrize(("path", "asked"), ONE_CALL.items(), ids=ONE_CALL)
async def test_a_reply_has_one_call_at_most_where_that_is_asked_and_grammars_are(path, asked, is_strict, settings):
    tools = STRICT_TOOLS[path] if is_strict else STRICT_TOOLS[path][1:]
    async with client_of("a") as client:
        made = await new_rollout(client, **settings)
        reply = await ask(client, made, path, **ASK[path], tools=tools, **asked)
        (call,) = (await record_of(client, made))["calls"]
    assert reply.status_code == 200, reply.text
    assert call["asked"]["parallel_tool_calls"] is False
    tag = client.engine.requests[0].get("structural_tag")
    if settings != {"grammars": True}:
        assert '"stop_after_first":true' not in str(tag)
        return
    tags = [call_of("f", SCHEMA)] * is_strict + [call_of("g", {"type": "object"})]
    wanted = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, "stop_after_first": True}
    assert json.loads(tag) == {"type": "structural_tag", "format": wanted}


async def test_one_call_at_most_is_noted_where_the_format_of_calls_has_no_grammar():
    async with client_of("a") as client:
        made = await new_rollout(client, grammars=True, tool_parser="llama3")
        await ask(client, made, tools=[function("g")], parallel_tool_calls=False)
        (call,) = (await record_of(client, made))["calls"]
    assert call["notes"] == ["parallel_tool_calls=false was not used: there is no grammar for calls as llama3 has them"]


THOUGHTS = {
    "opened": [{"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}],
    "allowed": [
        {
            "type": "or",
            "elements": [
                {"type": "const_string", "value": ""},
                {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
            ],
        }
    ],
}


@pytest.mark.parametrize(("thoughts", "before"), THOUGHTS.items(), ids=THOUGHTS)
def test_a_call_that_must_be_made_leaves_room_for_thoughts_before_it(thoughts, before):
    tag = grammar_of_calls(tool_format("hermes"), {"f": SCHEMA}, "f", thoughts)
    blanks = {"type": "regex", "pattern": r"\s{0,2}"}
    elements = [*before, blanks, {"type": "or", "elements": [call_of("f", SCHEMA)]}]
    assert tag == {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}


TEMPLATES = {
    "opened": "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}",
    "allowed": "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<think>{% endfor %}.",
    "none": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize(("thoughts", "template"), TEMPLATES.items(), ids=TEMPLATES)
def test_the_chat_template_says_if_thoughts_come_before_an_answer(thoughts, template):
    class Templated(Tokenizer):
        chat_template = template

        def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, tools=None):
            rendered = jinja2.Template(template, keep_trailing_newline=True)
            return rendered.render(messages=conversation, add_generation_prompt=add_generation_prompt)

    managed = managed_for(FakeServer(["a"]), Templated(), RolloutSettings())
    assert managed.thoughts_before(ChatRequest([{"role": "user", "content": "hi"}])) == thoughts


FOLLOW = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
CALL = FOLLOW % '{"a": 3}'
FOLLOWS = {  # with whether it is taken where the call must be made, and where it may
    "a call": ("none", CALL, True, True),
    "a call after words": ("none", "Well. " + CALL, False, True),
    "words": ("none", "Well.", False, True),
    "other arguments": ("none", FOLLOW % '{"a": "x"}', False, False),
    "two calls": ("none", f"{CALL}\n{CALL}", False, False),
    "words after a call": ("none", CALL + "Well.", False, False),
    "another tool": ("none", CALL.replace('"f"', '"g"'), False, False),
    "a thought first": ("allowed", "<think>\nf?\n</think>\n\n" + CALL, True, True),
    "a draft in a thought": ("allowed", f"<think>\n{CALL}?\n</think>\n\n{CALL}", True, True),
    "no thought": ("allowed", CALL, True, True),
    "two calls after a thought": ("allowed", f"<think>\n</think>\n\n{CALL}\n{CALL}", False, False),
    "an opened thought": ("opened", "f?\n</think>\n\n" + CALL, True, True),
    "in an opened thought": ("opened", CALL, False, False),
    "words after a thought": ("opened", "f?\n</think>\n\nWell.", False, True),
}


@pytest.mark.parametrize("must", [True, False], ids=["must", "may"])
@pytest.mark.parametrize(("thoughts", "text", "forced", "free"), FOLLOWS.values(), ids=FOLLOWS)
def test_xgrammar_takes_one_call_that_must_or_may_be_made_and_no_second(thoughts, text, forced, free, must):
    is_taken = forced if must else free
    xgrammar = pytest.importorskip("xgrammar", reason="the grammars of SGLang and vLLM are not installed")
    tag = json.dumps(
        grammar_of_calls(tool_format("hermes"), {"f": SCHEMA}, "f" if must else None, thoughts, is_one=True)
    )
    letters = xgrammar.TokenizerInfo([chr(code) for code in range(256)])
    grammar = xgrammar.GrammarCompiler(letters).compile_grammar(xgrammar.Grammar.from_structural_tag(tag))
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    assert (matcher.accept_string(text) and matcher.is_terminated()) == is_taken


async def test_a_grammar_that_would_forbid_the_tools_is_refused():
    async with client_of("a") as client:
        made = await new_rollout(client, grammars=True)
        reply = await ask(client, made, response_format=NAMED, tools=STRICT_TOOLS["chat/completions"])
    assert (reply.status_code, "can call no tool" in reply.text) == (400, True)


def test_vllm_gets_a_grammar_inside_its_structured_outputs():
    server = VLLMServer(APIServerConfig(model_name="m", base_url="http://x/v1", server_type="vllm"))
    from atroposlib.envs.server_handling.sampling import GenerationRequest

    sent = server._sampling(GenerationRequest({**grammar_of({}, NAMED), "temperature": 1.0}))
    assert sent == {"structured_outputs": {"json": TEXT}, "temperature": 1.0}


# -- what is not for an agent to say --------------------------------------------------------------------------------

FOREIGN = {
    "input_ids": [1, 2],
    "extra_body": {"temperature": 0},
    "extra_headers": {"Authorization": "x"},
    "timeout": 1,
    "split": "eval",
    "rid": "other",
    "lora_path": "/x",
    "custom_logit_processor": "x",
    "skip_special_tokens": True,
    "no_stop_trim": False,
    "truncate_prompt_tokens": 1,
    "return_hidden_states": True,
}
LOCKED = {"seed": 3, "logit_bias": {"5": 9}, "guided_regex": "a", "allowed_token_ids": [1], "temperature": 0.0}


@pytest.mark.parametrize(("field", "value"), [*FOREIGN.items(), *LOCKED.items()], ids=[*FOREIGN, *LOCKED])
@pytest.mark.parametrize("path", ASK)
async def test_a_field_that_is_not_for_an_agent_to_set_does_not_reach_the_engine(path, field, value):
    async with client_of("a") as client:
        made = await new_rollout(client)
        reply = await ask(client, made, path, **ASK[path], **{field: value})
        record = await record_of(client, made)
    assert reply.status_code == 200, reply.text
    (request,) = client.engine.requests
    assert {"temperature": 1.0, **request}.get(field) != value
    assert request["temperature"] == 1.0
    assert not {"extra_body", "extra_headers", "timeout", "split", "rid", "regex"} & request.keys()
    noted = [note for call in record["calls"] for note in call["notes"]]
    assert bool(noted) == (field in LOCKED)


# -- several at once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("equal", [True, False], ids=["equal requests", "others"])
async def test_requests_at_the_same_time_count_each_for_the_budget_and_all_end_with_the_rollout(equal):
    server = SlowServer(["a"] * 4, tokenizer=Tokenizer())
    async with client_of(server=server) as client:
        made = await new_rollout(client, max_calls=3)
        texts = ["same" if equal else str(n) for n in range(3)]
        asked = [
            asyncio.ensure_future(ask(client, made, messages=[{"role": "user", "content": text}])) for text in texts
        ]
        while (await record_of(client, made))["running"] < 3:
            await asyncio.sleep(0)
        more = await ask(client, made)  # the budget is used up: a text of the harness
        ended = await client.post(f"/rollouts/{made['id']}/end", json={}, headers=ADMIN)
        server.may_answer.set()
        replies = [(await each).status_code for each in asked]
        record = await record_of(client, made)
    assert (more.status_code, ended.status_code, replies) == (200, 200, [409] * 3)
    assert [call["calls"] for call in record["calls"]] == [[]]
    assert (record["running"], server.answered) == (0, 0)


class AbortableServer(SlowServer):
    """Knows what is asked for at once, and how many connections were closed."""

    aborted = 0

    async def tokens_and_logprobs_completion(self, **kwargs):
        self.began = [*getattr(self, "began", []), kwargs.get("max_tokens")]
        try:
            return await super().tokens_and_logprobs_completion(**kwargs)
        except asyncio.CancelledError:
            self.aborted += 1
            raise


LEAVING = {
    "json": (False, 60.0),
    "stream": (True, 60.0),
    "json that has begun": (False, 0.001),
    "stream that has begun": (True, 0.001),
}


@pytest.mark.parametrize("is_retried", [True, False], ids=["and asks again", "for good"])
@pytest.mark.parametrize(("is_stream", "quiet_s"), LEAVING.values(), ids=LEAVING)
async def test_a_client_that_went_away_is_waited_for_and_then_its_generation_is_aborted(
    monkeypatch, is_stream, quiet_s, is_retried
):
    for name in ("QUIET_S", "QUIET_JSON_S", "AWAKE_S"):
        monkeypatch.setattr(gateway_module, name, quiet_s)
    monkeypatch.setattr(rollouts_module, "KEPT_FOR_RETRY_S", 60.0 if is_retried else 0.01)
    server = AbortableServer(["one", "two"], tokenizer=Tokenizer())
    service = GatewayService(Rollouts(lambda settings: managed_for(server, server.tokenizer, settings)), "127.0.0.1")
    await service.start()
    rollout = service.rollouts.create(RolloutSettings(max_tokens=10))
    body, headers = {"messages": HELLO, "stream": is_stream}, {"x-api-key": rollout.key}
    async with asyncio.timeout(60):
        async with httpx.AsyncClient(base_url=service.url) as client:
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=headers))
            while not rollout.record()["running"]:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02 if quiet_s < 1 else 0)  # so that the reply begins
            asked.cancel()
        if is_retried:
            async with httpx.AsyncClient(base_url=service.url) as client:
                headers["x-stainless-retry-count"] = "1"
                again = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=headers))
                await asyncio.sleep(0.01)
                server.may_answer.set()
                assert "one" in (await again).text
        while rollout.record()["running"]:
            await asyncio.sleep(0.001)
        await service.stop()
    assert (server.aborted, server.answered) == ((0, 1) if is_retried else (1, 0))
    assert rollout.record()["faults"] == ({} if is_retried else {"abandoned": 1})
    assert rollout.generated_tokens() == (4 if is_retried else 0)


WHOLE = "x" * 19  # 20 tokens with the end
SHARING = {
    "each has room": ("a", {"max_tokens": 5}, 3, [5, 5, 5], [200] * 3),
    "two have room": ("a", {"max_tokens": 9}, 2, [9, 9, 9], [200] * 3),
    "no limit of their own": ("a", {}, 1, [20, 18, 16], [200] * 3),
    "a limit above the budget": ("a", {"max_tokens": 64000}, 1, [20, 18, 16], [200] * 3),
    "several choices": ("a", {"max_tokens": 5, "n": 2}, 2, [5, 5, 5], [200] * 3),
    "a token for each choice": ("aaa", {"max_tokens": 1, "n": 5}, 3, [1, 1, 1], [200] * 3),
    "the first uses all": (WHOLE, {}, 1, [20], [200, 200, 409]),
}


@pytest.mark.parametrize(("text", "asked", "at_once", "sent", "statuses"), SHARING.values(), ids=SHARING)
async def test_requests_at_the_same_time_never_have_more_tokens_together_than_are_left(
    text, asked, at_once, sent, statuses
):
    server = AbortableServer(text, tokenizer=Tokenizer())
    async with client_of(server=server) as client:
        made = await new_rollout(client, max_tokens=20)
        requests = [asyncio.ensure_future(ask(client, made, **asked)) for _ in range(3)]
        while (await record_of(client, made))["running"] < 3:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        began = server.began
        server.may_answer.set()
        assert sorted([(await each).status_code for each in requests]) == statuses
    assert began == sent[:at_once]
    assert sum(began) * asked.get("n", 1) <= 20
    assert server.began == sent


async def test_the_choices_of_a_request_share_what_is_left_of_the_tokens():
    async with client_of("a", "b", "c", "d") as client:
        made = await new_rollout(client, max_tokens=40)
        await ask(client, made, n=4, max_tokens=30)
        assert client.engine.requests[0]["max_tokens"] == 10
        said = (await ask(client, made, n=33)).json()["choices"]  # 32 are left
        assert [choice["message"]["content"] for choice in said] == [BUDGET_TEXT]
        assert (await ask(client, made)).status_code == 409
        assert "each choice" in (await record_of(client, made))["end_reason"]


# -- what cannot be understood ----------------------------------------------------------------------------------------


def nested(levels):
    return [] if levels == 1 else [nested(levels - 1)]


UNMET = {
    "chat/completions": {"logprobs": True, "functions": [{"name": "f"}], "audio": {"voice": "a"}},
    "completions": {"logprobs": 1, "echo": True, "suffix": "b"},
    "responses": {"conversation": "c", "top_logprobs": 2, "prompt": {"id": "p"}},
    "messages": {"mcp_servers": [{"url": "u"}]},
}
NAMELESS = {"tools": [{"type": "function"}]}
FORCED = {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [function("f")]}
CALL = {"id": "c", "type": "function", "function": {"arguments": "{}"}}
ODD = {
    "content that is a number": ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, "must be a text"),
    "a call that is a text": (
        "chat/completions",
        {"messages": [{"role": "assistant", "content": None, "tool_calls": ["x"]}, *HELLO]},
        "messages[0] has a tool call without the name",
    ),
    "a call without a name": (
        "chat/completions",
        {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}, *HELLO]},
        "messages[1] has a tool call without the name",
    ),
    "a tool without a name": ("chat/completions", NAMELESS, "must be a function with a name"),
    "a choice of no tool": ("chat/completions", FORCED, "one of the tools"),
    "a choice without tools": ("chat/completions", {"tool_choice": "required"}, "no tools are given"),
    "an unknown choice": ("chat/completions", {"tool_choice": "sometimes"}, "tool_choice is 'sometimes'"),
    "a choice of several": (
        "chat/completions",
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice is {'type': 'allowed_tools'",
    ),
    "a choice of no tool, responses": ("responses", {"tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    "a choice of no tool, messages": ("messages", {"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    "an unknown choice, messages": ("messages", {"tool_choice": {"type": "maybe"}}, "tool_choice"),
    "an item without a role": ("responses", {"input": [{}]}, "input[0] has no role"),
    "a message of nothing": (
        "messages",
        {"messages": [*HELLO, {"role": "user", "content": []}]},
        "messages[1] has no content",
    ),
    "a system prompt without text": ("messages", {"system": [{"type": "text"}]}, "system has a part of type 'text'"),
    **{
        f"an answer that is begun, {path}": (
            path,
            {where: [*HELLO, {"role": "assistant", "content": "{"}]},
            "the last message is the assistant's",
        )
        for path, where in {"messages": "messages", "chat/completions": "messages", "responses": "input"}.items()
    },
    "stream options": ("chat/completions", {"stream": True, "stream_options": 7}, "stream_options must be an object"),
    "stream options of a text": ("completions", {"stream": True, "stream_options": 7}, "stream_options must be an"),
    **{
        f"{name}, {path}": (path, {name: value}, f"{name} cannot be met here")
        for path, fields in UNMET.items()
        for name, value in fields.items()
    },
    "a stop that is a number": ("completions", {"stop": 3}, "stop is 3"),
    "too many choices": ("chat/completions", {"n": 129}, "128 choices at most"),
    "thoughts that are no text": (
        "chat/completions",
        {"messages": [*HELLO, {"role": "assistant", "content": "x", "reasoning_content": [["a"]]}, *HELLO]},
        "reasoning_content of messages[1] must be a text",
    ),
    "a tool's result that is a number": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": 7}]}]},
        "a result in messages[0] must be a list of objects",
    ),
    "a choice of no kind": ("messages", {"tool_choice": {"type": ["auto"]}}, "tool_choice is {'type': ['auto']}"),
    **{
        f"what is too deep, {path}": (path, {field: nested(300)}, "nested more than 200 levels deep")
        for path, field in {"messages": "metadata", "chat/completions": "tools", "responses": "input"}.items()
    },
}


@pytest.mark.parametrize(("path", "asked", "sentence"), ODD.values(), ids=ODD)
async def test_what_cannot_be_understood_is_refused_before_anything_is_generated(path, asked, sentence):
    async with client_of("a") as client:
        made = await new_rollout(client)
        reply = await ask(client, made, path, **{**ASK[path], **asked})
        record = await record_of(client, made)
    assert (reply.status_code, sentence in reply.json()["error"]["message"]) == (400, True), reply.text
    assert (record["calls"], client.engine.answered) == ([], 0)


REFUSED = {
    **ODD,
    **{
        f"an image, {name}": (path, {field: [{"role": "user", "content": parts}]}, "the model takes text only")
        for name, (path, field, parts) in IMAGES.items()
        if name != "count_tokens"
    },
    "a grammar and tools": ("chat/completions", {"regex": "a", "tools": [function("f")]}, "can call no tool"),
}


@pytest.mark.parametrize(("path", "asked", "sentence"), REFUSED.values(), ids=REFUSED)
async def test_what_is_refused_is_refused_before_and_after_an_end_and_ends_nothing(path, asked, sentence):
    async with client_of("a") as client:
        made = await new_rollout(client, max_calls=1, grammars=True)
        await ask(client, made)
        for said in (BUDGET_TEXT, "has ended (budget: 1 of 1 calls)"):  # spent, then ended
            reply = await ask(client, made, path, **{**ASK[path], **asked})
            assert (reply.status_code, sentence in reply.json()["error"]["message"]) == (400, True), reply.text
            assert said in (await ask(client, made)).text


UNUSABLE = {
    "no choice": ({"sampling": {"n": 0}}, "n is 0"),
    "a limit that is a text": ({"sampling": {"max_tokens": "5"}}, "max_tokens is '5'"),
    "a stop that is a number": ({"sampling": {"stop": 7}}, "stop is 7"),
    "ids": ({"sampling": {"input_ids": [1]}}, "sampling has input_ids"),
    "a name that no route finds": ({"rollout_id": "a/b"}, "rollout_id is 'a/b'"),
}


@pytest.mark.parametrize(("settings", "sentence"), UNUSABLE.values(), ids=UNUSABLE)
async def test_a_rollout_whose_every_request_would_fail_is_not_made(settings, sentence):
    async with client_of("a") as client:
        reply = await client.post("/rollouts", json=settings, headers=ADMIN)
    assert (reply.status_code, sentence in reply.text) == (400, True), reply.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/rollouts"])
async def test_a_client_that_goes_away_while_it_sends_is_no_error_of_the_gateway(caplog, path):
    class Leaving(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield b'{"messages": '
            raise ClientDisconnect

    async with client_of("a") as client:
        made = await new_rollout(client)
        headers = ADMIN if path == "/rollouts" else {"Authorization": f"Bearer {made['key']}"}
        reply = await client.post(path, content=Leaving(), headers=headers)
    assert (reply.status_code, [one.levelname for one in caplog.records if one.levelname == "ERROR"]) == (499, [])


async def test_a_service_ends_although_a_client_has_sent_half_a_request(caplog):
    server = FakeServer(["a"], tokenizer=Tokenizer())
    rollouts = Rollouts(lambda settings: managed_for(server, server.tokenizer, settings))
    service, rollout = GatewayService(rollouts, "127.0.0.1"), rollouts.create(RolloutSettings())
    await service.start()
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/messages HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {rollout.key}\r\n"
    writer.write(f"{head}Expect: 100-continue\r\nContent-Length: 99\r\n\r\n{{".encode())
    assert b"100 Continue" in await reader.readline()  # its body is waited for
    async with asyncio.timeout(60):
        await service.stop()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b"\r\n"
    writer.close()
    assert caplog.text == ""


@pytest.mark.parametrize("path", ["/rollouts", "/sessions/create"])
async def test_settings_that_no_reply_and_no_record_can_hold_are_refused(path):
    odd = {"/rollouts": {"sampling": {"a": nested(300)}}, "/sessions/create": {"base_url": "\ud800"}}[path]
    async with client_of("a") as client:
        reply = await client.post(path, content=json.dumps(odd), headers={**ADMIN, "Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), reply.text


async def test_the_deepest_body_that_is_taken_goes_into_the_record_of_its_rollout(tmp_path):
    schema = {"type": "object", "default": nested(190)}
    async with client_of("a", log=CallLog(tmp_path / "calls.jsonl")) as client:
        made = await new_rollout(client)
        said = [await ask(client, made, tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])]
        said.append(await ask(client, made))
        (first, _) = (await record_of(client, made))["calls"]
    assert [reply.status_code for reply in said] == [200, 200]
    assert first["calls"][0]["tools"][0]["function"]["parameters"] == schema


UNWRITABLE = {
    "a number beyond 64 bits": ("1" * 30, "1" * 30),
    "half a surrogate pair": (r'"\ud800"', "\ufffd"),
    "lists in lists": ("[" * 300 + "]" * 300, None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("written", "told"), UNWRITABLE.values(), ids=UNWRITABLE)
async def test_a_call_that_a_reply_cannot_hold_as_it_is_reaches_anthropics_agents(written, told, stream):
    tools = [{"name": "f", "input_schema": {}}]
    text = FOLLOW % f'{{"a": {written}}}'
    async with client_of(text) as client:
        made = await new_rollout(client)
        reply = await ask(client, made, "messages", **ASK["messages"], tools=tools, stream=stream)
    assert reply.status_code == 200, reply.text
    if not stream and told is not None:
        assert [part["input"] for part in reply.json()["content"]] == [{"a": told}]


async def test_all_reasoning_of_a_turn_is_one_thought():
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in ("one", "two")]
    answer = {"role": "assistant", "content": "a"}
    async with client_of("b") as client:
        made = await new_rollout(client)
        await ask(client, made, "responses", input=[*HELLO, *thoughts, answer, *HELLO])
        (call,) = (await record_of(client, made))["calls"]
    assert [said.get("reasoning_content") for said, _ in call["calls"][0]["new"]] == [None, "onetwo", None, None]


@pytest.mark.parametrize(
    ("second", "systems"), [({"instructions": "be kind"}, ["be kind", "use metres"]), ({}, ["use metres"])]
)
async def test_instructions_are_those_of_the_request_and_what_was_said_before_stays(second, systems):
    said = [{"role": "system", "content": "use metres"}, *HELLO]
    async with client_of("a", "b") as client:
        made = await new_rollout(client)
        first = (await ask(client, made, "responses", instructions="be brief", input=said)).json()
        await ask(client, made, "responses", previous_response_id=first["id"], input="more", **second)
        last = (await record_of(client, made))["calls"][-1]["calls"][0]
    assert [said["content"] for said, _ in last["new"] if said["role"] == "system"] == systems


async def test_a_choice_of_a_hosted_tool_that_was_left_out_is_no_choice():
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    async with client_of("a") as client:
        made = await new_rollout(client)
        choice = {"type": "tool", "name": "web_search"}
        reply = await ask(client, made, "messages", **ASK["messages"], tools=[hosted], tool_choice=choice)
    assert reply.status_code == 200


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
async def test_a_gateway_with_a_token_shows_its_routes_to_nobody(path):
    async with client_of() as client:
        assert (await client.get(path)).is_error


# -- bodies that repeat what was sent before ------------------------------------------------------------------------


def parts_of(content):
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


HISTORIES = {  # what the second, third and fourth request begin with, of what was said so far
    "as it was": (lambda chat: chat,) * 3,
    "an edit of a question": (lambda chat: [{**chat[0], "content": "Hi"}, *chat[1:]], lambda chat: chat) * 2,
    "an edit of an answer": (lambda chat: chat, lambda chat: [chat[0], {**chat[1], "content": "no"}, *chat[2:]]) * 2,
    "without the first turns": (lambda chat: chat, lambda chat: chat[2:], lambda chat: chat),
    "another order of keys": (lambda chat: [dict(reversed(one.items())) for one in chat], lambda chat: chat) * 2,
    "parts": (lambda chat: [{**one, "content": parts_of(one["content"])} for one in chat],) * 3,
    "a new beginning": (lambda chat: [{"role": "system", "content": "be kind"}, *chat],) * 3,
    "a developer": (lambda chat: [*chat, {"role": "developer", "content": "be kind"}], lambda chat: chat) * 2,
    "outer white space": (lambda chat: [{**one, "content": f" {one['content']} "} for one in chat],) * 3,
    "numbers and truth": (
        lambda chat: [{**one, "n": 1} for one in chat],
        lambda chat: [{**one, "n": True} for one in chat],
    ),
}


def answer_in(reply):
    """The assistant's message of a reply, as a client sends it back."""
    return reply["choices"][0]["message"] if "choices" in reply else {"role": "assistant", "content": reply["content"]}


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("edits", HISTORIES.values(), ids=HISTORIES)
async def test_the_rows_of_a_conversation_do_not_depend_on_what_of_its_bodies_was_known(edits, path):
    if path == "messages":
        systems = ({}, {"system": "be kind"}, {"system": "be kind"}, {"system": [{"type": "text", "text": "be"}]}, {})
    else:
        systems = ({},) * 5
    records = []
    for is_known in (True, False):
        async with client_of("one", "two <think>", "three", "four") as client:
            made, chat = await new_rollout(client), [*HELLO]
            for number, edit in enumerate((lambda chat: chat, lambda chat: chat, *edits[:3])):
                sent = edit(chat)
                fields = {"messages": sent, **systems[number], "max_tokens": 99}
                reply = await ask(client, made, path, **({} if is_known else {"user": f"{number}"}), **fields)
                chat = [*sent, answer_in(reply.json()), {"role": "user", "content": f"{number}?"}]
            calls = [call for exchange in (await record_of(client, made))["calls"] for call in exchange["calls"]]
            records.append((calls, [request["input_ids"] for request in client.engine.requests]))
    assert records[0] == records[1]


# -- ids that are sent ------------------------------------------------------------------------------------------------


async def test_every_request_sends_the_recorded_ids_of_its_history_and_those_that_are_new(engine, sglang):
    sglang.tokenizer = Tokenizer()
    async with client_of(server=sglang) as client:
        made, said = await new_rollout(client), []
        for edited in (None, None, "other", None):
            said += [{"role": "user", "content": f"turn {len(said)}"}]
            if edited:
                said[1] = {"role": "assistant", "content": edited}
            said.append((await ask(client, made, messages=said)).json()["choices"][0]["message"])
        calls = [each["calls"][0] for each in (await record_of(client, made))["calls"]]
    paths = []
    for call in calls:
        before = paths[call["parent"][0]] if call["parent"] else []
        paths.append(before + call["inserted"] + call["output"])
    sent = [paths[number][: -len(call["output"])] for number, call in enumerate(calls)]
    assert [body["input_ids"] for path, body in engine.requests if path == "/generate"] == sent
    assert [call["parent"] for call in calls] == [None, [0, 0], None, [2, 0]]


@pytest.mark.parametrize("path", ASK)
async def test_of_a_text_far_beyond_the_context_only_the_beginning_is_tokenized(engine, sglang, path):
    class Counting(Tokenizer):
        characters = 0

        def encode(self, text, *args, **options):
            Counting.characters += len(text)
            return super().encode(text, *args, **options)

    sglang.tokenizer, long = Counting(), "a" * 2**20
    asked = {"prompt": long} if path == "completions" else {"messages": [{"role": "user", "content": long}]}
    asked = {"input": long} if path == "responses" else {**asked, "max_tokens": 9}
    async with client_of(server=sglang) as client:
        made = await new_rollout(client)
        first = await ask(client, made, path, **asked)
        counted = await ask(client, made, "messages/count_tokens", messages=[{"role": "user", "content": long}])
        record = await record_of(client, made)
    assert first.status_code == 200, first.text
    assert [call["answers"][0]["finish_reason"] for call in record["calls"]] == ["length"]
    assert counted.json()["input_tokens"] > 2 * 4096
    assert [path for path, _ in engine.requests if path == "/generate"] == []
    assert Counting.characters < 2**18
