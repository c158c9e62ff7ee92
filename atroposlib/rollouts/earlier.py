"""Responses of an earlier run of the same problems, so that going from 16 to 32 responses generates only 16 more.

A recorded response is used again when item, model, prompt ids and sampling parameters are the same. Only responses of
one turn are: of a longer conversation, the prompts between are not known.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from atroposlib.errors import ConfigError
from atroposlib.rollouts.ledger import REJECTED, Entry, read_entries, read_line
from atroposlib.rollouts.locations import RunFiles
from atroposlib.rollouts.trace import EngineReply
from atroposlib.type_definitions import IGNORE_INDEX

logger = logging.getLogger(__name__)

_GROUPS_KEPT = 64  # parsed, as the responses of a group are asked for one after the other
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "regex", "json_schema"),
)
_SAME_AS = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}


@dataclass(frozen=True, slots=True)
class EarlierResponse:
    """One recorded response of one turn."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    reply: EngineReply


class EarlierRollouts:
    """The groups of a folder of rollout files, by item; lines are read when they are needed."""

    def __init__(self, folder: Path) -> None:
        """ConfigError when the folder holds no rollout files."""
        self._places: dict[str, tuple[Path, Entry]] = {}
        for index in sorted(folder.glob("*_rollouts_*.index")):
            files = RunFiles(folder, index.stem, env="", run="")
            shards = files.shards()
            for entry in read_entries(files):
                if entry.shard != REJECTED and entry.parts == 1:
                    self._places[entry.item_key] = (shards[entry.shard], entry)
        if not self._places:
            raise ConfigError(
                f"{folder} holds no rollouts of an earlier run; give the folder of its *_rollouts_*.jsonl"
            )
        self._parsed: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def find(
        self, item_key: str, index: int, *, model: str, input_ids: list[int] | None, asked: Mapping[str, Any]
    ) -> EarlierResponse | None:
        """Response `index` of the item's group, if it answers just this request."""
        record = self._record(item_key)
        if record is None or index >= len(record["tokens"]) or not record.get("inference_logprobs"):
            return None
        if (record.get("engine") or {}).get("model") != model or sampling_of(record["sampling"]) != sampling_of(asked):
            return None
        tokens, mask = record["tokens"][index], record["masks"][index]
        start = mask.count(IGNORE_INDEX)
        if tokens[:start] != input_ids or IGNORE_INDEX in mask[start:]:
            return None
        reasons, engine = record.get("finish_reasons"), record["engine"]
        reply = EngineReply(
            finish_reasons=[reasons[index] if reasons else "unknown"],
            prompt_tokens=start,
            completion_tokens=len(tokens) - start,
            model=model,
            base_url=engine.get("base_url"),
            weight_version=engine.get("weight_version_end"),
            sampling=record["sampling"],
        )
        return EarlierResponse(tokens[:start], tokens[start:], record["inference_logprobs"][index][start:], reply)

    def _record(self, item_key: str) -> dict[str, Any] | None:
        if item_key not in self._parsed:
            place = self._places.get(item_key)
            if place is None:
                return None
            try:
                self._parsed[item_key] = orjson.loads(read_line(*place))
            except orjson.JSONDecodeError as error:
                logger.warning("not used again: the group of item %s in %s is damaged (%s)", item_key, place[0], error)
                del self._places[item_key]
                return None
            if len(self._parsed) > _GROUPS_KEPT:
                self._parsed.popitem(last=False)
        return self._parsed[item_key]


def sampling_of(params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the parameters that shape the distribution, by one name each.

    >>> sampling_of({"n": 4, "max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 3})
    {'max_tokens': 8, 'temperature': 1.0}
    """
    named = {_SAME_AS.get(name, name): value for name, value in (params or {}).items() if value is not None}
    return {name: named[name] for name in sorted(named) if name in _SAMPLING}
