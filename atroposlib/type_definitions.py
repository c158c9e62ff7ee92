"""Types shared by every room: what environments build, what travels, what lies in rollout files.

Shapes: G = sequences of a group, T = tokens of one sequence (differs between sequences).
"""

from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeAlias, TypedDict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

IGNORE_INDEX = -100
"""`masks` value of a position that takes no loss."""

PROMPT_LOGPROB = 1.0
"""`inference_logprobs` value of a position the model did not generate; no real log-probability is above 0."""

ROLLOUT_SCHEMA_VERSION = 1

Json: TypeAlias = Any
"""A value of JSON, or of YAML, from outside: nothing is known of it before somebody looks."""

JsonObject: TypeAlias = dict[str, Json]
"""An object of JSON or YAML from outside, or on its way there: a reply, a line of a file, sampling parameters."""

Tokenizer: TypeAlias = Any
"""A tokenizer of Hugging Face's kind, or an author's object with the methods of one that are used."""

UUID: TypeAlias = str
Item: TypeAlias = Any
"""One thing to roll out. JSON-shaped, so that items in flight survive a restart."""

number: TypeAlias = int | float
Content: TypeAlias = str | list[JsonObject]


class Message(TypedDict, total=False):
    """One chat message; `role` is always there; further keys may be, and tool calls need no content."""

    role: str
    content: Content | None
    reward: float | None
    name: str
    tool_calls: list[JsonObject]
    tool_call_id: str
    reasoning_content: str


class AgentStep(TypedDict, total=False):
    """One turn of an agent: what it saw, what it said, what it got."""

    step: int
    messages: list[Message]
    reward: float


AgentHistory: TypeAlias = dict[str, list[AgentStep]]


class Observation(TypedDict):
    """An observation: what a game shows an agent."""

    raw: JsonObject
    rendered: Content


class GameStep(TypedDict, total=False):
    """One step of a game, from one agent's side."""

    step: int
    agent_id: str
    observation: Observation
    action: str
    reward: float
    done: bool
    info: JsonObject


GameHistory: TypeAlias = list[GameStep]


class ScoredDataGroup(TypedDict, total=False):
    """The G rollouts of one item, scored together. `tokens`, `masks`, `scores` are always there."""

    tokens: list[list[int]]  # [G][T] prompt + completion
    masks: list[list[int]]  # [G][T] IGNORE_INDEX, or the token id where loss is taken
    scores: list[float]  # [G]
    advantages: list[list[float]] | None  # [G][T]
    ref_logprobs: list[list[float]] | None  # [G][T]
    messages: list[list[Message]] | None  # [G] conversations
    generation_params: JsonObject | None
    inference_logprobs: list[list[float]] | None  # [G][T] PROMPT_LOGPROB where masked
    group_overrides: JsonObject | None
    overrides: list[JsonObject] | None  # [G]
    images: Json
    distill_token_ids: list[list[list[int]]] | None  # [G][T][k]
    distill_logprobs: list[list[list[float]]] | None  # [G][T][k]
    unscored: list["UnscoredResponse"]  # siblings that failed: no part of G, recorded but never sent to a trainer


class ScoredDataItem(TypedDict, total=False):
    """One scored rollout: the singular form of `ScoredDataGroup`."""

    tokens: list[int]
    masks: list[int]
    scores: float
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    messages: list[Message] | None
    generation_params: JsonObject | None
    inference_logprobs: list[float] | None
    group_overrides: JsonObject | None
    overrides: JsonObject | None
    images: Json
    distill_token_ids: list[list[int]] | None
    distill_logprobs: list[list[float]] | None


FinishReason: TypeAlias = Literal["stop", "length", "abort", "tool_calls", "unknown"]


class Usage(TypedDict):
    """Tokens of one group. The prompt counts once per group, as the engines count it."""

    prompt_tokens: int
    completion_tokens: int
    length_tokens: NotRequired[int]  # of these, in responses that the length limit cut off


class EngineInfo(TypedDict, total=False):
    """Which engine generated a group, and the weights it had at the first and last generation."""

    model: str
    base_url: str
    weight_version_start: str | None
    weight_version_end: str | None


FAILURE_CLASSES = ("request", "engine", "kill", "length", "verifier", "environment")


class UnscoredResponse(TypedDict):
    """A response without a score, kept next to the group of its siblings."""

    index: int  # among the responses as they were rolled out
    failure: str  # one of FAILURE_CLASSES
    error: str
    finish_reason: NotRequired[FinishReason]
    tokens: NotRequired[list[int]]  # absent when it never became a row
    masks: NotRequired[list[int]]  # IGNORE_INDEX everywhere: it takes no loss
    inference_logprobs: NotRequired[list[float]]  # PROMPT_LOGPROB everywhere
    messages: NotRequired[list[Message]]


class RolloutRecord(ScoredDataGroup, total=False):
    """One line of a rollout file: a group and where it came from.

    Upstream files hold only the ScoredDataGroup keys; every key below may be absent there.
    """

    schema_version: int
    group_id: str  # unique in a run; the same when a part is sent or written again
    item_key: str  # names the item; `get_item` sources use its index in decimal
    part: int  # this group is part `part` of `parts` that the item gave, from 0
    parts: int
    env: str
    task: str  # the real task's name, also when a mixture drew it
    run: str
    finish_reasons: list[FinishReason] | None  # [G]
    usage: Usage | None
    engine: EngineInfo | None
    sampling: JsonObject | None  # temperature, top_p, max_tokens, ... as sent to the engine
    created_at: float  # seconds since the epoch
    duration_s: float


class EvaluationConfigGeneral(TypedDict, total=False):
    """`config_general` of an evaluation's metrics.json."""

    model_name: str
    total_evaluation_time_seconds: str
    generation_parameters: JsonObject


EvaluationMetrics: TypeAlias = dict[str, float]
EvaluationSample: TypeAlias = JsonObject


class EvaluationResults(TypedDict):
    """The whole metrics.json."""

    config_general: EvaluationConfigGeneral
    results: dict[str, EvaluationMetrics]


def __getattr__(name: str) -> type:
    """`Array` is numpy's; loaded by those who use it, as numpy costs 0.1 s of CPU."""
    if name == "Array":
        from numpy import ndarray

        return ndarray
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
