"""Responses that the length limit cut off: whether they would have been right is not known."""

from collections.abc import Sequence

from atroposlib.envs.server_handling.managed_server import SequenceNode
from atroposlib.type_definitions import JsonObject


def overrides_of(nodes: Sequence[SequenceNode], right: Sequence[bool]) -> list[JsonObject] | None:
    """[G] trainer switches that keep cut-off responses, those that are right excepted, from counting as mistakes.

    None when no response needs one. The score stays in the group, where files and tables show it.
    """
    ignored = [_was_cut_off(node) and not is_right for node, is_right in zip(nodes, right, strict=True)]
    return [{"set_advantage_to_zero": True} if ignore else {} for ignore in ignored] if any(ignored) else None


def _was_cut_off(node: SequenceNode) -> bool:
    return (node.metadata or {}).get("finish_reason") == "length"
