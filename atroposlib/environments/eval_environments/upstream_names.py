"""Names that settings of evaluations have in atroposlib 0.4.0: what they are called here, and which have no effect."""

import logging
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, create_model

from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=BaseModel)

RENAMED = {
    "dataset_name": "dataset",
    "eval_dataset_name": "dataset",
    "eval_prompt_dataset": "dataset",
    "eval_baseline_dataset": "baseline_dataset",
    "subset": "dataset_config",
    "custom_system_prompt": "system_prompt",
    "eval_max_tokens": "max_token_length",
    "train_max_tokens": "max_token_length",
    "rollout_temperature": "temperature",
    "eval_runs_for_average": "eval_samples",
    "num_few_shot": "few_shot",
    "max_samples": "eval_problems",
    "shuffle_seed": "seed",
    "subjects": "only",
    "categories": "only",
    "eval_categories": "only",
    "subsets": "only",
    "tags_filter": "only",
}
UNSET = {"eval_max_tokens": 0, "judge_max_tokens": 0}
"""Values that mean in 0.4.0 that nothing is set."""
JUDGE = {"judge_model_name": "model_name", "judge_base_url": "base_url", "judge_api_key_env": "api_key"}
DIFFICULTIES = {"easy": "MixEval", "hard": "MixEval_Hard"}
SPLITS = {"freeform": "free_form", "multichoice": "multiple_choice"}
WITHOUT_EFFECT = (
    "case_sensitive", "compute_eed_score", "custom_judgment_prompt", "english_only", "eval_top_k", "full_debug",
    "fuzzy_match", "include_hope_suffix", "include_subject_in_prompt", "judge_max_concurrent_calls",
    "judge_max_retries", "judge_rate_limit_delay", "judge_retry_max_wait", "judge_retry_multiplier",
    "judge_temperature", "max_math_workers", "max_retries", "min_response_length",
    "num_choices", "retry_delay",
    "train_baseline_dataset", "train_dataset", "train_prompt_dataset", "use_detailed_prompt",
    "use_fallback_scoring", "use_llm_judge", "use_original_prompt", "years",
)  # fmt: skip
"""Requests are repeated, throttled and judged in one way here. They are taken so that files and commands still work."""


def with_old_names(config_cls: type[Config], name: str) -> type[Config]:
    """Return a config of this name that has the fields of `config_cls`, and takes their names of 0.4.0."""
    known = config_cls.model_fields
    renamed = {old: (known[new].annotation, f"0.4.0's name of {new}.") for old, new in RENAMED.items()}
    judge = dict.fromkeys(JUDGE, (str | None, "0.4.0's name of a part of judge."))
    others = dict.fromkeys(WITHOUT_EFFECT, (Any, "Of 0.4.0, without effect."))
    rest = {
        "difficulty": (str | None, "mixeval: easy or hard."),
        "question_types": (list[str] | None, "mixeval: freeform, multichoice or both."),
    }
    fields: dict[str, Any] = {
        old: (annotation if annotation is Any else annotation | None, Field(None, description=said))
        for old, (annotation, said) in {**renamed, **judge, **rest, **others}.items()
        if old not in known
    }
    return create_model(
        name, __base__=config_cls, __module__=config_cls.__module__, __doc__=config_cls.__doc__, **fields
    )


def translated(given: Mapping[str, Json]) -> JsonObject:
    """Return settings under the names that they have here; a value under an old name wins over one under the new."""
    old = {name: value for name, value in given.items() if value is not None and value != UNSET.get(name, ...)}
    settings = {name: value for name, value in given.items() if name not in RENAMED and name not in JUDGE}
    if settings.get("judge_max_tokens") == 0:
        del settings["judge_max_tokens"]
    settings |= {new: old[name] for name, new in RENAMED.items() if name in old}
    if judge := {new: old[name] for name, new in JUDGE.items() if name in old}:
        judge["api_key"] = os.environ.get(judge.get("api_key", ""), "")
        settings["judge"] = judge
    if (difficulty := settings.pop("difficulty", None)) is not None:
        settings["dataset_config"] = DIFFICULTIES.get(difficulty, difficulty)
    if (types := settings.pop("question_types", None)) is not None:
        settings["eval_split"] = "+".join(SPLITS.get(str(each), str(each)) for each in types)
    if idle := [name for name in WITHOUT_EFFECT if settings.pop(name, None) is not None]:
        logger.warning("settings of 0.4.0 without effect: %s", ", ".join(idle))
    return settings
