"""One recorded group as the page shows it: the prompt once, then each response with everything that was said of it.

Lists with one entry per response are told by their length, so what an environment added (verdicts, overrides, entropy
ranks, the trainer's log-probabilities) is shown without being known here. Token ids
get their text from the tokenizer of the run, which is loaded while the page is already shown.
"""

import logging
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeGuard

from atroposlib.data.chats import shared_prompt
from atroposlib.data.tokenizers import load_tokenizer
from atroposlib.errors import AtroposError
from atroposlib.paths import read_mapping
from atroposlib.type_definitions import IGNORE_INDEX, Json, JsonObject

logger = logging.getLogger(__name__)

PAGE_TOKENS = 4_000
"""Tokens sent at a time."""

TRAINER_LOGPROBS = ("trainer_logprobs", "old_logprobs", "ref_logprobs")
"""Keys, best first, whose difference to `inference_logprobs` is the gap."""

_LONG = ("tokens", "masks", "inference_logprobs")
_SHOWN = {"tokens", "masks", "messages", "scores", "finish_reasons", "images", "unscored"}


def group_detail(record: Mapping[str, Json]) -> JsonObject:
    """Return prompt, responses and the rest of a record; the latter without long lists."""
    scores = record.get("scores") or []
    messages = record.get("messages") or []
    shared = shared_prompt(messages) if isinstance(messages, list) else 0
    per_response = {key: value for key, value in record.items() if _is_per_response(key, value, len(scores))}
    responses = [
        {
            "score": score,
            "finish": _at(record, "finish_reasons", index),
            "messages": _rest(_at(record, "messages", index), shared),
            "tokens": len(ids) if isinstance(ids := _at(record, "tokens", index), list) else 0,
            "facts": {
                key: value[index]
                for key, value in per_response.items()
                if key not in _SHOWN and value[index] not in (None, {}, []) and not _is_channel(value[index])
            },
        }
        for index, score in enumerate(scores)
    ]
    unscored = record.get("unscored")
    return {
        "channels": [
            key for key, value in per_response.items() if key not in _SHOWN and value and _is_channel(value[0])
        ],
        "prompt": messages[0][:shared] if shared else [],
        "responses": responses,
        "unscored": [
            {key: value for key, value in each.items() if key not in _LONG}
            for each in (unscored if isinstance(unscored, list) else ())
            if isinstance(each, dict)
        ],
        "about": {
            key: value
            for key, value in record.items()
            if key not in _SHOWN and key not in per_response and value is not None
        },
        "images": _data_images(record.get("images")),
    }


def tokens_of(record: Mapping[str, object], index: int, start: int) -> JsonObject | None:
    """Return `PAGE_TOKENS` tokens of one response from `start`; None where no ids were recorded.

    Channels are the numbers recorded for each token, by the record's key.
    """
    ids, masks = _at(record, "tokens", index), _at(record, "masks", index)
    if not (ids and masks and isinstance(ids, list) and isinstance(masks, list)):
        return None
    end = start + PAGE_TOKENS
    channels = {
        key: rows[index]
        for key, rows in record.items()
        if key not in ("tokens", "masks") and isinstance(rows, list) and index < len(rows) and _is_channel(rows[index])
    }
    return {
        "start": start,
        "total": len(ids),
        "ids": ids[start:end],
        "trained": [mask != IGNORE_INDEX for mask in masks[start:end]],
        "channels": {key: values[start:end] for key, values in channels.items() if len(values) == len(ids)},
    }


def mean_gap(record: Mapping[str, Json], index: int) -> float:
    """Mean distance of the trainer's log-probabilities from the engine's over trained tokens; NaN when not recorded."""
    theirs = next((rows for key in TRAINER_LOGPROBS if (rows := _at(record, key, index))), None)
    ours, masks = _at(record, "inference_logprobs", index), _at(record, "masks", index)
    if not (_is_channel(theirs) and _is_channel(ours) and _is_channel(masks)):
        return math.nan
    gaps = [
        abs(a - b)
        for a, b, mask in zip(theirs, ours, masks, strict=False)
        if mask != IGNORE_INDEX and a is not None and b is not None
    ]
    return sum(gaps) / len(gaps) if gaps else math.nan


def subset(record: Mapping[str, Json], indices: list[int]) -> JsonObject:
    """The record with these responses only, which says its own size then."""
    count = len(record.get("scores") or [])
    if indices == list(range(count)):
        return dict(record)
    rest = {
        key: [value[index] for index in indices] if _is_per_response(key, value, count) else value
        for key, value in record.items()
    }
    overrides = record.get("group_overrides")
    return rest | {
        "group_overrides": {**(overrides if isinstance(overrides, dict) else {}), "group_size": len(indices)}
    }


def _is_per_response(key: str, value: object, count: int) -> bool:
    if not isinstance(value, list) or len(value) != count or key == "unscored":
        return False
    return key != "tools" or all(isinstance(each, list | None) for each in value)  # of the group, or of each response


def _is_channel(value: object) -> TypeGuard[list[float | None]]:
    return isinstance(value, list) and bool(value) and all(isinstance(each, int | float | None) for each in value)


def _at(record: Mapping[str, object], key: str, index: int) -> Json:
    rows = record.get(key)
    return rows[index] if isinstance(rows, list) and index < len(rows) else None


def _rest(messages: object, shared: int) -> object:
    return messages[shared:] if shared and isinstance(messages, list) else messages


def _data_images(value: object) -> list[str]:
    """Images that are held in the record itself; nothing is fetched from elsewhere."""
    if isinstance(value, str):
        return [value] if value.startswith("data:image/") else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [image for each in inner for image in _data_images(each)]


Decode = Callable[[list[int]], str]
_BROKEN = "\ufffd"
_LONGEST_CHARACTER = 8  # tokens


class TokenTexts:
    """Tokenizers by the name or folder that stands for them; each is loaded once, by a thread."""

    def __init__(self, spec: str | None = None) -> None:
        """`spec`: of all files; None: that of their run."""
        self._spec = spec
        self._of_folder: dict[Path, str | None] = {}
        self._loaded: dict[str, Decode | str] = {}  # a text says why there is none
        self._loading: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()

    def spec_of(self, path: Path, record: JsonObject) -> str | None:
        """The tokenizer of a rollout file: the one given, that of the run's settings, or that of the engine's model."""
        if self._spec:
            return self._spec
        folder = path.parent
        if folder not in self._of_folder:
            self._of_folder[folder] = _spec_of_run(folder) if path.exists() else None  # a running API is no file
        engine = record.get("engine")
        model = engine.get("model") if isinstance(engine, dict) else None
        is_name = isinstance(model, str) and "/" in model  # of an embedded model the settings name the folder
        return self._of_folder[folder] or (model if is_name else None)

    def texts(self, spec: str | None, ids: list[int]) -> tuple[list[str] | None, str]:
        """The text of each id, or None and why: it is being loaded, or cannot be had."""
        if spec is None:
            return None, "no tokenizer is known; give --tokenizer"
        with self._lock:
            if spec not in self._loading:
                self._loading[spec] = threading.Thread(target=self._load, args=(spec,), name="tokenizer", daemon=True)
                self._loading[spec].start()
        decode = self._loaded.get(spec)
        if decode is None:
            return None, "loading"
        if isinstance(decode, str):
            return None, decode
        try:
            return pieces(decode, ids), ""
        except (ValueError, OverflowError, TypeError) as error:
            return None, f"tokenizer {spec}: {error}; are these the ids of another model?"

    def _load(self, spec: str) -> None:
        try:
            tokenizer = load_tokenizer(spec)
            self._loaded[spec] = lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        except Exception as error:  # of a library; the page shows ids instead
            logger.warning("%s", error)
            self._loaded[spec] = str(error)


def pieces(decode: Decode, ids: list[int]) -> list[str]:
    """The text of each id; of a character made of several tokens all stands with the last of them."""
    found: list[str] = []
    start = 0
    for at in range(len(ids)):
        text = decode(ids[start : at + 1])
        if text.endswith(_BROKEN) and at + 1 < len(ids) and at - start < _LONGEST_CHARACTER:
            found.append("")
            continue
        found.append(text)
        start = at + 1
    return found


def _spec_of_run(folder: Path) -> str | None:
    """The tokenizer that the settings next to rollout files name; None where there are none."""
    for path in sorted(folder.glob("*.config.yaml")):
        try:
            env = read_mapping(path, expected="settings", what="settings of a run").get("env")
        except AtroposError:
            continue
        name = env.get("tokenizer_name") if isinstance(env, dict) else None
        if isinstance(name, str) and name:
            return name
    return None
