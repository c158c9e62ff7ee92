"""Settings of a rollout, its budgets among them; and what of a request counts: sampling parameters and grammars.

Grammars keep a model's tool calls to the schemas of the tools, in the form of XGrammar.

Source: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from atroposlib.envs.server_handling.conversation import Thoughts
from atroposlib.envs.server_handling.managed_server import ChatRequest
from atroposlib.envs.server_handling.sampling import GRAMMARS, check_sampling, words
from atroposlib.envs.server_handling.tool_formats import ToolFormat, tool_format
from atroposlib.errors import RequestFault
from atroposlib.type_definitions import Json, JsonObject

_SHAPES = words(
    """temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty logit_bias regex
    json_schema ebnf structural_tag min_new_tokens min_tokens ignore_eos allowed_token_ids bad_words seed
    sampling_seed"""
)
"""They change the distribution that tokens are drawn from."""


class TurnSettings(BaseModel):
    """Reading of the model's turns, and recognition of those that an agent sends back."""

    tool_parser: str = Field("hermes", description="Format of the model's tool calls; names as SGLang's.")
    reasoning_parser: str | None = Field("think", description="Take thoughts out of replies; null: leave them.")
    history: Literal["keep", "template"] = Field(
        "keep", description="A turn sent back without its thoughts: keep its tokens, or let the template render it."
    )
    normalise: list[str] = Field(
        default_factory=list,
        description="Rewritings that count as none: names of agent programs (smolagents), or /PATTERN/ for what is not "
        "compared in messages that are not the assistant's.",
    )


class RolloutSettings(TurnSettings):
    """Sampling and budgets of a rollout, and what it belongs to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout_id: str | None = Field(None, description="Name of the rollout; asked for again, the same one is given.")
    item_id: str | None = Field(None, description="What is rolled out.")
    group_id: str | None = Field(None, description="Rollouts of one item that are compared.")
    base_url: str | None = Field(None, description="Generate on the server with this address; null: the least used.")
    sampling: JsonObject = Field(default_factory=dict, description="Sampling parameters, named as engines do.")
    locked: bool = Field(True, description="The agent's own parameters that change the distribution have no effect.")
    grammars: bool | None = Field(
        None,
        description="Bind the model to the grammar of a request (response_format, guided_*, strict tools), where the "
        "engine can; false: note it only. null: where sampling is not locked.",
    )
    max_calls: PositiveInt | None = Field(None, description="Most requests.")
    max_tokens: PositiveInt | None = Field(None, description="Most generated tokens.")
    timeout_s: PositiveFloat | None = Field(None, description="Seconds from its creation to the last request.")
    idle_s: PositiveFloat | None = Field(
        None, description="Seconds without a request of the agent that end the rollout; null: as its gateway has it."
    )


_NO_SAMPLING = words("messages prompt input_ids stream tools tool_choice")


def check_usable(settings: RolloutSettings) -> None:
    """RequestFault where every request of a new rollout would fail, or no route would find it."""
    check_sampling(settings.sampling)
    if taken := settings.sampling.keys() & _NO_SAMPLING:
        raise RequestFault(f"sampling has {', '.join(sorted(taken))}, which is for each request to say")
    if "/" in (settings.rollout_id or ""):
        raise RequestFault(f"rollout_id is {settings.rollout_id!r}; no route would find it, leave out the slash")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as a dialect understood it: a chat, or a text to complete."""

    dialect: str
    chat: ChatRequest | None
    prompt: str | None
    sampling: Mapping[str, Json]
    model: str
    notes: Sequence[str] = ()
    strict: Mapping[str, Json] | None = None  # schema of each tool's arguments, where one is strict
    instructions: bool = False  # its first message is for this request only
    one_call: bool = False  # a reply may call one tool at most

    def recorded(self) -> JsonObject:
        """Return what is kept of it next to its messages."""
        return {
            **self.sampling,
            "model": self.model,
            **({"strict": [*self.strict]} if self.strict else {}),
            **({"instructions": True} if self.instructions else {}),
            **({"parallel_tool_calls": False} if self.one_call else {}),
        }


def counted_sampling(
    settings: RolloutSettings,
    request: Asked,
    thoughts_before: Callable[[ChatRequest], Thoughts],
    *,
    default_max_tokens: int | None = None,
) -> tuple[JsonObject, list[str]]:
    """Return the parameters that count, and what was overridden.

    Args:
        thoughts_before: tells if thoughts come before the answer; asked where a grammar must leave room for them.
        default_max_tokens: where neither settings nor request say one; None: the engine's.

    Raises:
        RequestFault: a grammar for the reply, and tools that it would forbid.
    """
    asked = dict(request.sampling)
    is_bound = settings.grammars if settings.grammars is not None else not settings.locked
    locked = {*(_SHAPES if settings.locked else ())} - GRAMMARS.keys() | (GRAMMARS.keys() if not is_bound else set())
    kept = {key: value for key, value in asked.items() if key not in locked}
    used = {"temperature": 1.0, **settings.sampling, **kept}
    if settings.locked:
        used |= settings.sampling
    if default_max_tokens is not None:
        used.setdefault("max_tokens", default_max_tokens)
    notes = []
    if is_bound and not settings.sampling.keys() & GRAMMARS.keys():
        notes = _bind(settings, request, used, thoughts_before)
    if limit := settings.sampling.get("max_tokens"):
        used["max_tokens"] = min(used.get("max_tokens") or limit, limit)
    given = [key for key in asked if key in _SHAPES and asked[key] != used.get(key)]
    for key in given:
        why = "grammars are only noted" if key in GRAMMARS else "sampling is locked"
        notes.append(f"{why}: {key}={repr(asked[key])[:200]} was not used")
    return used, notes


def _bind(
    settings: RolloutSettings, request: Asked, used: JsonObject, thoughts_before: Callable[[ChatRequest], Thoughts]
) -> list[str]:
    """Keep the calls of strict tools to their schemas, and their number to one; notes of what cannot be kept."""
    chat = request.chat
    if chat is None or not chat.tools or chat.tool_choice == "none":
        return []
    if grammar := used.keys() & GRAMMARS.keys():
        raise RequestFault(
            f"a reply that follows a grammar ({', '.join(grammar)}) can call no tool; leave out either of them"
        )
    is_one = request.one_call and bool(settings.grammars)  # agents ask for it by habit: only where it was chosen
    schemas = request.strict or (
        {tool["function"]["name"]: {"type": "object"} for tool in chat.tools} if is_one else {}
    )
    if not schemas:
        return []
    calls, wanted = tool_format(settings.tool_parser), chat.wanted_tool
    thoughts = "none" if wanted is None and not is_one else "allowed" if calls.never_thought else thoughts_before(chat)
    tag = grammar_of_calls(calls, schemas, wanted, thoughts, is_one=is_one)
    if tag is None:
        asked = " and ".join(["strict"] * bool(request.strict) + ["parallel_tool_calls=false"] * is_one)
        return [f"{asked} was not used: there is no grammar for calls as {settings.tool_parser} has them"]
    used["structural_tag"] = orjson.dumps(tag).decode()
    return []


MOST_BLANKS = 16
"""In one place of the arguments; a model that may writes blanks without end."""


def grammar_of_calls(
    calls: ToolFormat, schemas: Mapping[str, Json], wanted: str | None, thoughts: Thoughts, *, is_one: bool = False
) -> JsonObject | None:
    """Return the structural tag that keeps arguments to their schemas; None: there is none for this format.

    A call that must be made begins at once, or behind thoughts where there are any, and ends the reply: a model that
    may write another one need not end before its limit, and a cut reply calls nothing.

    Args:
        wanted: name of the tool that must be called; "" for any, None where there may be words and no call.
        is_one: a call that may be made ends the reply, too.
    """
    may = wanted is None
    if calls.closing is None or (may and not calls.is_marked):
        return None
    ends = is_one or not may
    head, foot = calls.section if ends else ("", "")
    tags: list[Json] = [
        {
            "type": "tag",
            "begin": head + calls.opening(name),
            "content": _arguments(calls, schema),
            "end": [calls.closing, ""] if calls.is_stop else calls.closing + foot,
        }
        for name, schema in schemas.items()
        if wanted in (None, "", name)
    ]
    answer: JsonObject = {"type": "or", "elements": tags}
    if may:
        mark = head or calls.opening(None).partition("\n")[0]
        answer = {"type": "triggered_tags", "triggers": [mark], "tags": tags, "stop_after_first": is_one}
    return {"type": "structural_tag", "format": _behind(calls, thoughts, answer) if ends else answer}


def _behind(calls: ToolFormat, thoughts: Thoughts, answer: JsonObject) -> JsonObject:
    if thoughts == "none":
        return answer
    begin, end = calls.thoughts
    content: JsonObject = {"type": "any_text"}
    if calls.never_thought:
        content["excludes"] = [*calls.never_thought]
    thought = {"type": "tag", "begin": "" if thoughts == "opened" else begin, "content": content, "end": end}
    nothing = {"type": "const_string", "value": ""}
    first = thought if thoughts == "opened" else {"type": "or", "elements": [nothing, thought]}
    blanks = [] if calls.never_thought else [{"type": "regex", "pattern": r"\s{0,2}"}]
    return {"type": "sequence", "elements": [first, *blanks, answer]}


def _arguments(calls: ToolFormat, schema: Json) -> JsonObject:
    content: JsonObject = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_BLANKS}
    if calls.style != "json":
        # XGrammar below 0.1.33 passes over a style, and would bind the model to JSON: it refuses what it cannot repeat
        content = {"type": "repeat", "min": 1, "max": 1, "content": {**content, "style": calls.style}}
    if not calls.number:
        return content
    return {"type": "sequence", "elements": [{"type": "regex", "pattern": calls.number}, content]}
