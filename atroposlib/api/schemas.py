"""Request and answer models of the API, as clients have always known them.

`ScoredData` documents the routes for groups, whose bodies `group_checks.py` reads; it never builds these objects.
"""

from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
)

from atroposlib.errors import ApiError
from atroposlib.type_definitions import Json, JsonObject

MAX_NAME_CHARS = 200


class Refused(ApiError):
    """A request that is understood and cannot be done; `status` is the HTTP code, `code` the reason for programs."""

    def __init__(self, status: int, sentence: str, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status: int = status
        self.code = code


def _encodable(value: str) -> str:
    """Refuse halves of surrogate pairs, which JSON can name and no file or answer can hold."""
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"is {value[:40]!a}; expected Unicode text without lone surrogates")
    return value


Text = Annotated[str, AfterValidator(_encodable)]


class Registration(BaseModel):
    """A trainer announces a run."""

    wandb_group: Text = Field(description="wandb group that environments join.")
    wandb_project: Text = Field(description="wandb project that environments log to.")
    batch_size: PositiveInt = Field(
        le=10_000_000, description="Sequences of a batch; every batch holds exactly this many."
    )
    max_token_len: int = Field(
        ge=-1, le=2**31 - 1, description="Tokens of the longest sequence the trainer takes; -1: no limit."
    )
    checkpoint_dir: Text = Field(description="Folder for checkpoints; environments keep theirs next to the trainer's.")
    save_checkpoint_interval: int = Field(description="Steps between checkpoints; 0 or less: none.")
    starting_step: NonNegativeInt = Field(le=2**53, description="Step the trainer starts from.")
    num_steps: int = Field(description="Steps the trainer will take; informs environments.")

    @field_validator("max_token_len")
    @classmethod
    def _takes_something(cls, value: int) -> int:
        if value == 0:
            raise ValueError("is 0; expected the longest sequence that the trainer takes, or -1 for no limit")
        return value

    @field_validator("checkpoint_dir")
    @classmethod
    def _no_way_up(cls, value: str) -> str:
        if ".." in value.replace("\\", "/").split("/") or "\0" in value:
            raise ValueError(f"is {value!r}; expected a folder without '..' in it")
        return value


class RegisterEnv(BaseModel):
    """An environment announces itself."""

    max_token_length: PositiveInt = Field(le=2**31 - 1, description="Tokens of the longest sequence it generates.")
    desired_name: Text | None = Field(description="Name in wandb and in paths; null: `env`. A number is appended.")
    weight: FiniteFloat | None = Field(description="Share of inference slots relative to others; null: 1.")
    group_size: PositiveInt = Field(le=10_000_000, description="Sequences of its usual group.")
    min_batch_allocation: FiniteFloat | None = Field(
        None,
        ge=0,
        le=1,
        description="Least share of every batch, 0 to 1; scaled down where all are above 1; null: none.",
    )

    @field_validator("desired_name")
    @classmethod
    def _safe_in_paths(cls, value: str | None) -> str | None:
        if value is None or value == "":
            return None
        if len(value) > MAX_NAME_CHARS or value.startswith(".") or any(c in "/\\" or ord(c) < 32 for c in value):
            raise ValueError(
                f"is {value[:40]!r}; expected at most {MAX_NAME_CHARS} characters that are safe in a path: "
                "no '/', no '\\', no control characters, no leading '.'"
            )
        return value


class EnvIdentifier(BaseModel):
    """Which environment asks."""

    env_id: NonNegativeInt = Field(le=2**53, description="The number that /register-env returned.")


class ScoredData(BaseModel):
    """One scored group. G = sequences, T = tokens of one sequence (may differ between sequences)."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "tokens": [[1, 2, 3], [1, 2, 4]],
                "masks": [[-100, 2, 3], [-100, 2, 4]],
                "scores": [1.0, -1.0],
                "inference_logprobs": [[1.0, -0.1, -0.2], [1.0, -0.1, -1.7]],
                "env_id": 0,
                "group_id": "gsm8k-000017",
            }
        }
    )

    tokens: list[list[int]] = Field(description="[G][T] token ids of prompt and completion.")
    masks: list[list[int]] = Field(description="[G][T] -100 where no loss is taken, else the token id.")
    scores: list[float] = Field(description="[G] finite.")
    advantages: list[list[float]] | None = Field(None, description="[G][any length].")
    ref_logprobs: list[list[float]] | None = Field(None, description="[G][T]")
    messages: list[list[JsonObject]] | None = Field(None, description="[G] conversations; role and content needed.")
    generation_params: JsonObject | None = None
    inference_logprobs: list[list[float]] | None = Field(None, description="[G][T] 1.0 where masked.")
    overrides: list[JsonObject] | None = Field(None, description="[G] switches per sequence.")
    group_overrides: JsonObject | None = None
    images: Json = None
    env_id: int | None = Field(None, ge=0, description="The number that /register-env returned.")
    distill_token_ids: list[list[list[int]]] | None = Field(None, description="[G][T][k]")
    distill_logprobs: list[list[list[float]]] | None = Field(None, description="[G][T][k]")
    group_id: str | None = Field(None, description="Sent twice, stored once. Not handed to the trainer.")


class NoExample(ScoredData):
    """A group of nothing, as /latest_example gives it before there is one."""

    model_config = ConfigDict(json_schema_extra={})

    generation_params: Annotated[list[Json], Field(max_length=0)]  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]


class EnvRegistered(BaseModel):
    """Answer to /register-env: only `status` while the trainer has not started."""

    status: str = Field(description="`success`, or `wait for trainer to start`.")
    env_id: int | None = None
    wandb_name: str | None = None
    checkpoint_dir: str | None = None
    starting_step: int | None = None
    checkpoint_interval: int | None = None
    num_steps: int | None = None
    run_id: str | None = Field(None, description="Changes with /reset_data; send it as X-Atropos-Run with groups.")


class Info(BaseModel):
    """Limits of the trainer; -1 before it registered."""

    batch_size: int
    max_token_len: int


class Status(BaseModel):
    """Progress of the run."""

    current_step: int
    queue_size: int = Field(description="Groups that wait.")
    queue_sequences: int
    buffered_groups: int = Field(description="Part groups that wait for the rest of their environment's group size.")
    leased_batches: int
    waiting_for: str | None = Field(description="Why no batch is ready, in words; null when one is.")
    storage_full: str | None = Field(description="Why groups are answered 503 now, in words; null when they are not.")


class EnvStatus(BaseModel):
    """Facts for an environment's back-pressure; sizes in units of its own groups."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float


class Received(BaseModel):
    """A group is on disk: in the queue, or in its environment's buffer."""

    status: str = Field(description="`received` or `buffered`.")
    buffer_size: int | None = Field(None, description="Sequences in the environment's buffer.")
    duplicate: bool | None = Field(None, description="True: it was stored before and is not stored again.")


class ReceivedList(BaseModel):
    """All groups of the list are on disk."""

    status: str
    groups_processed: int
    buffered: int | None = None
    last_buffer_size: int | None = None
    duplicates: int | None = None


class NextBatch(BaseModel):
    """`batch` is null while none can be formed; before a trainer registered, `status` is `error` too."""

    batch: list[JsonObject] | None = Field(description="Groups, each with all 14 keys of ScoredData.")
    batch_id: str | None = Field(None, description="Only with lease_s: acknowledge it with POST /batch/ack.")
    status: str | None = None
    message: str | None = None
