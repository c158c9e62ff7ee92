"""Environments: `from atroposlib.envs import BaseEnv, BaseEnvConfig`. Names are imported when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atroposlib.envs.base import (
        APIServerConfig,
        BaseEnv,
        BaseEnvConfig,
        EvalHandlingEnum,
        Item,
        ScoredDataGroup,
        ScoredDataItem,
        ServerBaseline,
    )

__all__ = [
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandlingEnum",
    "Item",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("atroposlib.envs.base"), name)
