"""From the chosen responses of one group to dataset records: generators, no files.

messages   {"messages": [...], "score": x}                    OpenAI chat
sharegpt   {"conversations": [{"from", "value"}...], "score"}
prefix     {"prefix": text, "completion": text, "score": x}   decoded; a line for each stretch that takes loss
tokens     {"input_ids", "attention_mask", "labels", "position_ids", "score"}   recorded ids; labels -100 where masked
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from atroposlib.data.lazy import Raw
from atroposlib.data.table import Chosen
from atroposlib.data.tokenizers import check_ids
from atroposlib.errors import RowError
from atroposlib.type_definitions import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Format: TypeAlias = Literal["messages", "sharegpt", "prefix", "tokens"]
Record: TypeAlias = Mapping[str, Any]
Converter: TypeAlias = Callable[[Chosen], Iterator[Record]]

WRONG_MASK = "mask that does not fit the ids"
SHAREGPT_ROLES = {"user": "human", "human": "human", "assistant": "gpt", "agent": "gpt", "system": "system"}


class ChatMessage(msgspec.Struct):
    """What every message must have; other keys are passed on."""

    role: str
    content: Raw


_ids_decoder = msgspec.json.Decoder(list[int])
_chat_decoder = msgspec.json.Decoder(list[ChatMessage])


def to_messages(chosen: Chosen) -> Iterator[Record]:
    """The recorded conversations as they are, without per-message rewards."""
    for index in chosen.indices:
        yield {"messages": chat(chosen, index), "score": chosen.group.scores[index]}


def to_sharegpt(chosen: Chosen) -> Iterator[Record]:
    """The recorded conversations in ShareGPT's words; tool messages keep their role's name."""
    for index in chosen.indices:
        turns = [
            {"from": SHAREGPT_ROLES.get(message.role, message.role), "value": message.content}
            for message in _chat_decoder.decode(chat(chosen, index))
        ]
        yield {"conversations": turns, "score": chosen.group.scores[index]}


def to_prefix(tokenizer: "PreTrainedTokenizerBase") -> Converter:
    """Decoded text of each stretch that takes loss, and of everything before it (upstream's default format).

    A response of several turns gives a record for each of the assistant's, so that no completion holds what a user
    or a tool said.
    """

    def convert(chosen: Chosen) -> Iterator[Record]:
        pieces: list[list[int]] = []
        scores: list[float] = []
        for index in chosen.indices:
            ids, labels = ids_and_labels(chosen, index, len(tokenizer))
            for start, end in trained_stretches(labels):
                pieces += [ids[:start], ids[start:end]]
                scores.append(chosen.group.scores[index])
        texts = iter(decode_batch(tokenizer, pieces))
        for score in scores:
            yield {"prefix": next(texts), "completion": next(texts), "score": score}

    return convert


def to_tokens(vocabulary_size: int | None) -> Converter:
    """The recorded ids with labels from the recorded masks; ids are checked when the vocabulary is known."""

    def convert(chosen: Chosen) -> Iterator[Record]:
        for index in chosen.indices:
            ids, labels = ids_and_labels(chosen, index, vocabulary_size)
            yield token_record(ids, labels, chosen.group.scores[index])

    return convert


def token_record(ids: list[int], labels: list[int], score: float) -> Record:
    """One record of the `tokens` format."""
    positions = list(range(len(ids)))
    return {
        "input_ids": ids,
        "attention_mask": [1] * len(ids),
        "labels": labels,
        "position_ids": positions,
        "score": score,
    }


def ids_and_labels(chosen: Chosen, index: int, vocabulary_size: int | None) -> tuple[list[int], list[int]]:
    """Recorded ids and labels of one response, both [T].

    Raises:
        RowError: ids and mask differ in length, a mask value is neither -100 nor the id, nothing takes loss, or an
            id is outside the vocabulary.
    """
    group, where = chosen.group, f"{chosen.line.where}[{index}]"
    ids, labels = _decode_ids(group.tokens, index, "tokens", where), _decode_ids(group.masks, index, "masks", where)
    if len(ids) != len(labels):
        raise RowError(
            where, WRONG_MASK, f"{len(ids)} tokens but {len(labels)} mask values; they must match one to one"
        )
    trained = len(labels) - labels.count(IGNORE_INDEX)
    if not trained:
        raise RowError(
            where, "nothing generated", "every position is masked, so there is nothing to train on; drop this response"
        )
    if labels[-trained:] != ids[-trained:]:  # not simply prompt, then completion
        _check_mask(ids, labels, where)
    if vocabulary_size is not None:
        check_ids(ids, vocabulary_size, where)
    return ids, labels


def prefix_length(labels: list[int]) -> int:
    """How many positions come before the first that takes loss."""
    return next((at for at, label in enumerate(labels) if label != IGNORE_INDEX), len(labels))


def trained_stretches(labels: list[int]) -> list[tuple[int, int]]:
    """Start and end of each run of positions that take loss.

    >>> trained_stretches([-100, 5, 6, -100, 7])
    [(1, 3), (4, 5)]
    """
    runs = groupby(range(len(labels)), lambda at: labels[at] != IGNORE_INDEX)
    trained = (list(run) for is_trained, run in runs if is_trained)
    return [(run[0], run[-1] + 1) for run in trained]


def decode_batch(tokenizer: "PreTrainedTokenizerBase", rows: list[list[int]]) -> list[str]:
    """The text of each row of ids, special tokens included."""
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def chat(chosen: Chosen, index: int) -> Raw:
    """The conversation of one response as JSON, checked to be a list of messages, without `reward` keys.

    Raises:
        RowError: there is none, or it is not a list of messages with role and content.
    """
    group, where = chosen.group, f"{chosen.line.where}[{index}]"
    if not group.messages:
        raise RowError(
            where,
            "no messages recorded",
            "'messages' were not recorded (null); use --format prefix or tokens, which need "
            "only token ids, or set include_messages: true in the environment",
        )
    raw = group.messages[index]
    try:
        messages = _chat_decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise RowError(where, "no chat", f"'messages' is not a list of {{role, content}} ({error})") from error
    if not messages:
        raise RowError(where, "empty conversation", "the conversation is empty; drop this response")
    return _without_rewards(raw) if b'"reward"' in bytes(raw) else raw


def _without_rewards(raw: Raw) -> Raw:
    messages = msgspec.json.decode(raw)
    return Raw(msgspec.json.encode([{k: v for k, v in message.items() if k != "reward"} for message in messages]))


def _decode_ids(rows: list[Raw] | None, index: int, name: str, where: str) -> list[int]:
    if not rows:
        raise RowError(where, "no token ids recorded", f"no {name} were recorded; this format needs them")
    try:
        return _ids_decoder.decode(rows[index])
    except msgspec.DecodeError as error:
        raise RowError(where, "ids that are no numbers", f"{name} is not a list of whole numbers ({error})") from error


def _check_mask(ids: list[int], labels: list[int], where: str) -> None:
    for at, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORE_INDEX, token):
            raise RowError(
                where,
                WRONG_MASK,
                f"masks[{at}] is {label} where tokens[{at}] is {token}; "
                f"expected {IGNORE_INDEX} (no loss) or the token id",
            )
