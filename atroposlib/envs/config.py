"""Configuration of an environment. The descriptions are what `--help` shows."""

from collections.abc import Mapping
from enum import Enum
from typing import Literal

from pydantic import BaseModel, Field


class EvalHandlingEnum(Enum):
    """Treatment of rollouts while an evaluation runs. Those already running are always finished."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class BaseEnvConfig(BaseModel):
    """Settings every environment has; environments subclass it. Unknown keyword arguments are ignored here, but
    refused in YAML files and on the command line."""

    # groups and their rollouts
    group_size: int = Field(default=4, ge=1, description="Sequences per group: how often each item is rolled out.")
    max_num_workers: int | Literal["auto"] = Field(
        default=-1,
        description="Groups rolled out at the same time; -1: max_num_workers_per_node for each inference server; "
        "auto: found and followed from the engine's load.",
    )
    max_num_workers_per_node: int = Field(
        default=8, ge=1, description="Groups at the same time for each inference server."
    )
    max_eval_workers: int = Field(
        default=16, description="Evaluation requests at the same time, where an environment uses it."
    )
    max_token_length: int = Field(default=2048, description="Tokens an environment lets the model generate.")
    worker_timeout: float = Field(default=600, description="Seconds one group may take; 0 or less: no limit.")
    ensure_scores_are_not_same: bool = Field(default=True, description="Drop groups whose scores are all equal.")
    include_messages: bool = Field(
        default=False,
        description="Add the chat of the managed server to groups that carry no messages; rollout files always get it.",
    )
    tokenizer_name: str = Field(
        default="NousResearch/DeepHermes-3-Llama-3-3B-Preview",
        description="Tokenizer: a folder, or a name on the model hub.",
    )

    # serving a trainer
    rollout_server_url: str = Field(default="http://localhost:8000", description="Address of the trajectory API.")
    total_steps: int = Field(
        default=1000,
        description="serve: stop after this many training steps (-1: as many as the trainer says). "
        "process: groups to write.",
    )
    total_groups: int | None = Field(
        default=None, description="serve: stop after exactly this many stored groups, instead of after total_steps."
    )
    batch_size: int = Field(default=-1, description="Sequences per training batch; -1: the trainer says.")
    max_batches_offpolicy: int = Field(
        default=3, description="Batches to be ahead of the trainer before new rollouts wait; 0 or less: no limit."
    )
    inference_weight: float = Field(
        default=1.0, description="This environment's share of inference, relative to others."
    )
    min_batch_allocation: float | None = Field(
        default=None, description="Share of every batch (0 to 1) that must come from this environment; null: none."
    )

    # evaluation
    steps_per_eval: int = Field(default=100, description="Training steps between evaluations; 0 or less: none.")
    eval_handling: EvalHandlingEnum = Field(
        default=EvalHandlingEnum.STOP_TRAIN, description="What rollouts do while an evaluation runs."
    )
    eval_limit_ratio: float = Field(default=0.5, description="Share of the rollouts that continue during LIMIT_TRAIN.")
    data_dir_to_save_evals: str | None = Field(
        default=None, description="Folder for evaluation results; null: none are kept."
    )

    # rollout files
    data_path_to_save_groups: str | None = Field(
        default=None, description="Write every group to this one .jsonl file; null: process uses data/<name>.jsonl."
    )
    dump_rollouts: bool = Field(default=False, description="serve: also write every group to shards in rollouts_dir.")
    rollouts_dir: str | None = Field(
        default=None, description="Folder for rollout shards; null: data when they are written."
    )
    run_name: str = Field(
        default="main", description="Names the run's files; a run resumes where files of its name end."
    )
    groups_per_shard: int = Field(default=100, ge=1, description="Groups per rollout shard.")
    compress_rollouts: bool = Field(
        default=False, description="Compress each complete shard to .jsonl.zst; the last stays .jsonl."
    )
    stop_after_accepted: int | None = Field(
        default=None,
        ge=1,
        description="For datasets: sample an item in rounds until N responses are accepted; null: whole groups.",
    )
    hopeless_rate: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="For datasets: sample an item in rounds, and no more once its rate of accepted responses is below "
        "this with 95% confidence (Wilson's interval); null: never.",
    )
    total_accepted: int | None = Field(
        default=None, ge=1, description="Stop when this many responses are accepted, also before all groups are stored."
    )
    token_budget: int | None = Field(
        default=None, ge=1, description="Stop when this many tokens have been generated for stored and rejected groups."
    )
    response_journal: Literal["off", "responses", "tokens"] = Field(
        default="off",
        description="Keep what unfinished groups have so far, for a restart: finished responses, or with tokens also "
        "those in the making (SGLang only). Every response is then a request of its own. off: groups start again.",
    )
    response_seed: int | None = Field(
        default=None,
        description="With response_journal: send every response's own seed, derived from this; null: no seed.",
    )
    reuse_rollouts: str | None = Field(
        default=None,
        description="With response_journal: rollout folder of an earlier run of the same items, model and sampling "
        "parameters, whose responses of one turn come first, so that a larger group_size generates only the others.",
    )
    progress_path: str | None = Field(default=None, description="Progress file; null: next to the rollouts.")
    accept_score: float = Field(default=0.0, description="A response counts as accepted when its score is above.")
    task_failure_limit: int = Field(
        default=10, ge=1, description="Failures of a task in a row after which the task is set aside."
    )

    # a run shared by several processes
    lease_dir: str | None = Field(
        default=None, description="Folder seen by all processes that share a run; null: this one is alone."
    )
    lease_owner: str = Field(default="main", description="Name of this process among them, the same after a restart.")
    lease_items: int = Field(default=8, ge=1, description="Items that a process takes at a time.")
    lease_timeout: float = Field(
        default=120, gt=0, description="Seconds of silence after which the others take over a process's items."
    )

    # logging
    use_wandb: bool = Field(default=True, description="Log to Weights & Biases; offline when there are no credentials.")
    wandb_name: str | None = Field(default=None, description="Start of the run's name; null: the environment's name.")
    num_rollouts_to_keep: int = Field(default=32, description="Groups kept for the table of rollouts.")
    num_rollouts_per_group_for_logging: int = Field(
        default=1, description="Rollouts of each group in that table; -1: all."
    )
    min_items_sent_before_logging: int = Field(
        default=2, description="Groups to send before metrics are logged; 0 or less: log at every step."
    )

    # reasoning models
    thinking_mode: bool = Field(default=False, description="Ask the model to think before it answers.")
    reasoning_effort: str | None = Field(
        default=None, description="none, minimal, low, medium, high or xhigh; null: the provider's default."
    )
    max_reasoning_tokens: int | None = Field(
        default=None, ge=1024, le=32000, description="Tokens for thinking; null: the provider's default."
    )
    custom_thinking_prompt: str | None = Field(
        default=None, description="System prompt for thinking, where an environment uses one; null: its own."
    )

    @classmethod
    def reset_by(cls, flags: Mapping[str, object]) -> dict[str, object]:
        """Return what settings of a YAML file become which would keep one of these flags from having its effect.

        >>> BaseEnvConfig.reset_by({"data_path_to_save_groups": "groups.jsonl"})
        {'rollouts_dir': None}
        """
        reset: dict[str, object] = {}
        if flags.get("data_path_to_save_groups") or flags.get("dump_rollouts") is False:
            reset["rollouts_dir"] = None
        if flags.get("rollouts_dir"):
            reset["data_path_to_save_groups"] = None
        if "total_steps" in flags:
            reset["total_groups"] = None
        if "max_num_workers_per_node" in flags:
            reset["max_num_workers"] = -1
        return reset
