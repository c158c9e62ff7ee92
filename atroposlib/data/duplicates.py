"""Selection by what responses say: exact and near duplicates, and overlap with evaluation sets.

These need the files' contents, so they read lines again, but only those with a row that is still kept. Completions
are compared by their recorded token ids, or by all that the model wrote when no ids were recorded.
"""

import json
import logging
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from atroposlib.data.chats import WEIGHT, assistant_turns, content_texts, messages_of, written
from atroposlib.data.lazy_group import LazyGroup, hash64
from atroposlib.data.rollout_files import expand_input
from atroposlib.data.table import Table
from atroposlib.errors import DataError
from atroposlib.type_definitions import IGNORE_INDEX, Array

logger = logging.getLogger(__name__)

SIGNATURE = 128  # bins of a one-permutation MinHash
BAND = 8  # bins per LSH band: with 16 bands, pairs of similarity 0.8 collide with probability 0.95
MIN_WORDS = 8  # evaluation texts below this are too common to match on
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_ONE_BY_ONE = (  # letters of scripts that put no spaces between words; and Hangul, whose words change their endings
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e50-\u0e59\u0e80-\u0eff"  # Thai, Lao
    "\u1000-\u1049\u1050-\u109d\u1780-\u17d3\u17dc-\u17ff"  # Burmese, Khmer
    "\u3005-\u3007\u3040-\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u312f\u31f0-\u31ff\uff66-\uff9f"  # Kana, Bopomofo
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af\uffa0-\uffdc"  # Hangul
)
_WORD = re.compile(rf"[^\W{_ONE_BY_ONE}]+|[{_ONE_BY_ONE}]")


@dataclass(frozen=True)
class Contamination:
    """One response or prompt that shares text with an evaluation set."""

    where: str  # file:line[index] of the response
    part: str  # "prompt" or "completion"
    against: str  # file:line of the evaluation set
    text: str  # the shared words


def duplicates(table: Table, keep: Array, *, per_item: bool) -> Array:
    """[responses] of bool: kept rows whose completion equals an earlier kept row's."""
    seen: set[int] = set()
    found = np.zeros_like(keep)
    items = table.column("item")
    for chosen in table.read(keep):
        for index, row in zip(chosen.indices, chosen.rows, strict=True):
            whose = (int(items[row]) if per_item else 0).to_bytes(8, "little")
            key = hash64(whose + completion_key(chosen.group, index))
            found[row] = key in seen
            seen.add(key)
    return found


def near_duplicates(table: Table, keep: Array, *, threshold: float, ngram: int, per_item: bool) -> Array:
    """[responses] of bool: kept rows at least `threshold` similar to an earlier one that stays.

    Similarity is the Jaccard index of n-gram sets, estimated by a one-permutation MinHash of `SIGNATURE` bins
    (standard error below 0.05); candidates come from `SIGNATURE // BAND` LSH bands. 512 bytes a kept response.

    Source: Li, Owen, Zhang, "One permutation hashing", NIPS 2012; banding after Broder 1997.
    """
    found = np.zeros_like(keep)
    buckets: dict[int, list[int]] = {}
    signatures: list[Array] = []
    items = table.column("item")
    for chosen in table.read(keep):
        for index, row in zip(chosen.indices, chosen.rows, strict=True):
            ids = completion_ids(chosen.group, index)
            signature = minhash(np.unique(rolling(ids, min(ngram, max(1, len(ids))))))  # shorter: whole
            salt = int(items[row]) if per_item else 0
            bands = [hash((salt, at, signature[at : at + BAND].tobytes())) for at in range(0, SIGNATURE, BAND)]
            candidates = {earlier for band in bands for earlier in buckets.get(band, ())}
            if any(float(np.mean(signatures[earlier] == signature)) >= threshold for earlier in candidates):
                found[row] = True
                continue
            for band in bands:
                buckets.setdefault(band, []).append(len(signatures))
            signatures.append(signature)
    return found


def minhash(hashes: Array) -> Array:
    """[SIGNATURE] of u4: the least hash in each bin; an empty bin takes the next filled one's."""
    signature = np.full(SIGNATURE, np.iinfo(np.uint32).max, np.uint32)
    if len(hashes):
        np.minimum.at(signature, hashes % SIGNATURE, (hashes >> np.uint64(32)).astype(np.uint32))
        filled = np.unique(hashes % SIGNATURE).astype(int)
        nearest = np.searchsorted(filled, np.arange(SIGNATURE)) % len(filled)
        signature = signature[filled[nearest]]
    return signature


def rolling(ids: Array, ngram: int) -> Array:
    """[len(ids) - ngram + 1] 64-bit hashes of the n-grams of `ids`."""
    count = len(ids) - ngram + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for at in range(ngram):
            hashes = (hashes ^ ids[at : at + count].astype(np.uint64)) * _MULTIPLIER
            hashes ^= hashes >> np.uint64(29)
    return hashes


def completion_key(group: LazyGroup, index: int) -> bytes:
    """Return what the model wrote, exactly: its token ids, or if none were recorded its turns with all their calls."""
    if group.tokens and group.masks:
        return trained_ids(group, index).tobytes()
    messages = messages_of(group, index)
    generated = [messages[at] for at in assistant_turns(messages) if messages[at].get(WEIGHT) != 0]
    return json.dumps([written(message) for message in generated]).encode()


def completion_ids(group: LazyGroup, index: int) -> Array:
    """[T] token ids that take loss; hashes of the words written when no ids were recorded."""
    if group.tokens and group.masks:
        return trained_ids(group, index)
    return word_ids(completion_text(group, index))


def trained_ids(group: LazyGroup, index: int) -> Array:
    """[T] token ids that take loss."""
    ids = np.array(msgspec.json.decode((group.masks or [])[index]), np.int64)
    return ids[ids != IGNORE_INDEX]


def completion_text(group: LazyGroup, index: int) -> str:
    """All that the assistant wrote in all of its turns, reasoning and calls included; "" without messages."""
    messages = messages_of(group, index)
    return "\n".join(text for at in assistant_turns(messages) for text in written(messages[at]))


def prompt_text(group: LazyGroup, index: int) -> str:
    """Everything said to the assistant; "" without messages."""
    messages = messages_of(group, index)
    answers = set(assistant_turns(messages))
    said = [each for at, each in enumerate(messages) if at not in answers]
    return "\n".join(text for message in said for text in content_texts(message.get("content")))


def word_ids(text: str) -> Array:
    """[words] of a 32-bit number per word, lower case, without punctuation.

    In Chinese, Japanese, Korean, Thai and their like each character is a word.
    """
    return np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())], np.int64)


def contaminated(table: Table, keep: Array, against: list[str], ngram: int) -> tuple[Array, list[Contamination]]:
    """Kept rows whose prompt or completion shares `ngram` words in a row with an evaluation text.

    An evaluation text of `MIN_WORDS` to `ngram` words must occur as a whole; below that it is not looked for.

    Raises:
        DataError: an evaluation set cannot be read, or rollouts without messages, which have no words.
    """
    texts = [(source, word_ids(text)) for source, text in _eval_texts(against)]
    shortest = min(MIN_WORDS, ngram)
    _warn_of_short(texts, shortest)
    library = {length: _ngrams(texts, length, ngram) for length in range(shortest, ngram + 1)}
    found = np.zeros_like(keep)
    report: list[Contamination] = []
    for chosen in table.read(keep):
        if not chosen.group.messages:
            raise DataError(f"{chosen.line.where}: no messages were recorded, so its words cannot be compared")
        prompt_hit = _first_hit(library, prompt_text(chosen.group, chosen.indices[0]))
        for index, row in zip(chosen.indices, chosen.rows, strict=True):
            hit = prompt_hit or _first_hit(library, completion_text(chosen.group, index))
            if hit:
                found[row] = True
                report.append(Contamination(table.where(row), "prompt" if prompt_hit else "completion", *hit))
    return found, report


def _warn_of_short(texts: list[tuple[str, Array]], shortest: int) -> None:
    """Say how many evaluation entries have no text of at least `shortest` words."""
    longest: dict[str, int] = {}
    for source, words in texts:
        longest[source] = max(len(words), longest.get(source, 0))
    short = [source for source, count in longest.items() if 0 < count < shortest]
    if short:
        logger.warning(
            "evaluation entries that are too short to be looked for (below %d words): %d of %d, first %s",
            *(shortest, len(short), len(longest), short[0]),
        )


def _ngrams(texts: list[tuple[str, Array]], length: int, longest: int) -> dict[int, str]:
    """Return each n-gram and its first place: all of texts when `length` is the longest, else texts of that length."""
    found: dict[int, str] = {}
    for source, words in texts:
        if length == longest or len(words) == length:
            for value in rolling(words, length).tolist():
                found.setdefault(value, source)
    return found


def _first_hit(library: dict[int, dict[int, str]], text: str) -> tuple[str, str] | None:
    words = word_ids(text)
    for length, known in library.items():
        for at, value in enumerate(rolling(words, length).tolist() if known else ()):
            if value in known:
                return known[value], " ".join(_WORD.findall(text.lower())[at : at + length])
    return None


def _eval_texts(against: list[str]) -> Iterator[tuple[str, str]]:
    """(file:line, text) of each entry; of JSON objects all text values together and each by itself."""
    for name in against:
        path = expand_input(name, what="decontaminate.against")
        try:
            with path.open(encoding="utf-8", newline="\n") as stream:  # unlike splitlines not at U+2028
                lines = [line.rstrip("\r\n") for line in stream]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"evaluation set {path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            yield from ((f"{path}:{number}", text) for text in _texts_in(line, path))


def _texts_in(line: str, path: Path) -> list[str]:
    if path.suffix == ".txt":
        return [line]
    try:
        return _strings(json.loads(line))
    except ValueError:
        raise DataError(f"evaluation set {path} is not JSON lines; give .jsonl, or .txt with one text a line") from None


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in _strings(each)]
