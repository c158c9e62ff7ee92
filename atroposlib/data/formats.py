"""From the chosen responses of one group to dataset records: generators, no files.

prompt-completion  {"prompt": [...], "completion": [...], "score": x}   a row for each generated turn
messages           {"messages": [...], "score": x}                      OpenAI chat; each assistant turn has a `weight`
sharegpt           {"conversations": [{"from", "value"}...], "score"}   likewise
prefix             {"prefix": text, "completion": text, "score": x}     decoded; a row for each stretch that takes loss
tokens             {"input_ids", "attention_mask", "labels", "position_ids", "score"}   labels -100 where masked

The first three have a column `tools`, as JSON text, where the model was given tools. Every key of a message is kept.
"""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from atroposlib.data.chats import (
    ASSISTANT_ROLES,
    REASONING_KEYS,
    WEIGHT,
    Message,
    RecordedChat,
    content_texts,
    in_tags,
    parsed_arguments,
    part_text,
    read_chat,
    reasoning_of,
)
from atroposlib.data.lazy_group import Raw, hash64
from atroposlib.data.table import Chosen
from atroposlib.data.tokenizers import check_ids
from atroposlib.errors import RowError
from atroposlib.type_definitions import IGNORE_INDEX, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Format: TypeAlias = Literal["prompt-completion", "messages", "sharegpt", "prefix", "tokens"]
Record: TypeAlias = Mapping[str, object]
Converter: TypeAlias = Callable[[Chosen], Iterator[Record]]

NO_PROMPT = ("an answer without a prompt", "the model's turn is the first message, so there is no prompt")
WRONG_MASK = "mask that does not fit the ids"
SHAREGPT_ROLES = {
    "user": "human",
    "assistant": "gpt",
    "agent": "gpt",
    "system": "system",
    "developer": "system",
    "tool": "observation",
    "function": "observation",
}
_BETWEEN_RESULTS = "\n</tool_response>\n<tool_response>\n"
_SPOKEN = {"role", "content", "tool_calls", "function_call", *REASONING_KEYS}  # what a value of ShareGPT says
_BESIDE_THE_TEXT = ("score", "attention_mask", "position_ids")
_encoder = msgspec.json.Encoder()
_ids_decoder = msgspec.json.Decoder(list[int])


def chat_of(chosen: Chosen, index: int, decode: Callable[[Chosen, int], list[str]] | None = None) -> RecordedChat:
    """The conversation of one of a group's responses, and which of its turns were generated.

    `decode` gives the text of each stretch that its mask trains, where only that tells; None: there is no tokenizer.

    Raises:
        RowError: see `read_chat`.
    """
    decode_runs = (lambda: decode(chosen, index)) if decode else None
    return read_chat(chosen.group, index, f"{chosen.line.where}[{index}]", decode_runs)


def to_prompt_completion(chat: RecordedChat, score: float) -> Iterator[Record]:
    """A record for each generated turn, with everything before it as its prompt.

    Trainers take loss on the whole completion, so it holds nothing else; turns that follow each other are one.

    Raises:
        RowError: the first message was generated.
    """
    for start, end in _runs(chat.generated):
        if not start:
            raise RowError(chat.where, *NO_PROMPT)
        yield {"prompt": chat.kept[:start], "completion": chat.kept[start:end], **tools_column(chat), "score": score}


def to_messages(chat: RecordedChat, score: float, *, per_turn: bool = False) -> Iterator[Record]:
    """The conversation as it was recorded; `weight` is 1 in generated turns and 0 in others of the assistant.

    `per_turn`: a record for each generated turn, which ends with it and has no other of weight 1.
    """
    for messages, generated in _cuts(chat, per_turn=per_turn):
        weighted = [_weighted(chat, at, messages[at], at in generated) for at in range(len(messages))]
        yield {"messages": weighted, **tools_column(chat), "score": score}


def to_sharegpt(chat: RecordedChat, score: float, *, per_turn: bool = False) -> Iterator[Record]:
    """The conversation in ShareGPT's words, with weights as `to_messages` gives them.

    Reasoning stands in `<think>` tags before the text, calls are JSON in a turn of `function_call`, and what follows
    several of them is one turn of results.

    Raises:
        RowError: parts that hold no text, or text next to a call, for which this format has no place.
    """
    for messages, generated in _cuts(chat, per_turn=per_turn):
        turns = [
            {
                **_sharegpt(chat.messages[at], chat.where),
                **{key: kept[key] for key in kept if key not in _SPOKEN},
                **_weighted(chat, at, {}, at in generated),
            }
            for at, kept in enumerate(messages)
        ]
        turns = [turn for role, each in groupby(turns, itemgetter("from")) for turn in _joined(role, list(each))]
        yield {"conversations": turns, **tools_column(chat), "score": score}


def _joined(role: str, turns: list[JsonObject]) -> list[JsonObject]:
    """Return turns that follow each other; results of several calls as one, which LLaMA-Factory skips otherwise.

    They are parted as it parts those of OpenAI chats; the ids of their calls stand in the turn before, in their order.
    """
    if role != SHAREGPT_ROLES["tool"] or len(turns) == 1:
        return turns
    return [{"from": role, "value": _BETWEEN_RESULTS.join(turn["value"] for turn in turns)}]


def _runs(generated: list[int]) -> list[tuple[int, int]]:
    """Start and end of each run of turns that follow each other.

    >>> _runs([1, 2, 5])
    [(1, 3), (5, 6)]
    """
    starts = [at for at in generated if at - 1 not in generated]
    return list(zip(starts, [at + 1 for at in generated if at + 1 not in generated], strict=True))


def _cuts(chat: RecordedChat, *, per_turn: bool) -> list[tuple[list[dict[str, Raw]], range | list[int]]]:
    """The messages of each record and which of them are generated."""
    if not per_turn:
        return [(chat.kept, chat.generated)]
    return [(chat.kept[:end], range(start, end)) for start, end in _runs(chat.generated)]


def _weighted(chat: RecordedChat, at: int, message: JsonObject, is_generated: bool) -> JsonObject:
    is_assistant = chat.messages[at]["role"] in ASSISTANT_ROLES
    return {**message, WEIGHT: int(is_generated)} if is_assistant else message


def tools_column(chat: RecordedChat) -> dict[str, str]:
    """As text, or loaders would give every tool the parameters of every other."""
    return {"tools": bytes(chat.tools).decode()} if chat.tools else {}


def _sharegpt(message: Message, where: str) -> dict[str, str]:
    content = message.get("content")
    if isinstance(content, list) and not all(part_text(part) for part in content):
        raise RowError(where, "parts that hold no text", "a part of a message is no text, which is all ShareGPT holds")
    text, thoughts, calls = "".join(content_texts(content)), reasoning_of(message), message.get("tool_calls")
    if calls and text.strip():
        raise RowError(where, "text next to a tool call", "ShareGPT has no place for text next to a call")
    role = "function_call" if calls else SHAREGPT_ROLES.get(message["role"]) or str(message["role"])
    if calls:
        text = json.dumps([_sharegpt_call(call) for call in calls], ensure_ascii=False)
    elif "function_call" in message:
        raise RowError(where, "a call in the old form", "function_call has no place in ShareGPT; record tool_calls")
    has_thoughts = "</think>" in text or not thoughts  # some parsers leave them in place
    return {"from": role, "value": text if has_thoughts else in_tags(thoughts) + text}


def _sharegpt_call(call: JsonObject) -> JsonObject:
    """Name and arguments, as JSON where they are; then the call's id and the like."""
    function = call.get("function") or {}
    rest = {key: call[key] for key in call if key != "function"}
    return {**function, "arguments": parsed_arguments(function.get("arguments")), **rest}


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
            yield token_record(*ids_and_labels(chosen, index, vocabulary_size), chosen.group.scores[index])

    return convert


def _positions(count: int) -> bytes:
    """Return the JSON of 0, 1, ... below `count`, cut from a longer one, of which there are few.

    >>> _positions(12)
    b'[0,1,2,3,4,5,6,7,8,9,10,11]'
    """
    digits = count + sum(count - 10**power for power in range(1, len(str(count - 1))))
    return b"[%b]" % _counting(1 << count.bit_length())[: digits + count - 1]


@cache
def _counting(count: int) -> bytes:
    return ",".join(map(str, range(count))).encode()


class Copies:
    """Counts the records that equal an earlier one in all but their scores; 8 bytes a record."""

    def __init__(self) -> None:
        self._seen = array("Q")

    def note(self, record: Record) -> Record:
        """Count `record`, and return it."""
        said = {key: record[key] for key in record if not key.startswith(_BESIDE_THE_TEXT)}
        self._seen.append(hash64(_encoder.encode(said)))
        return record

    @property
    def count(self) -> int:
        return len(self._seen) - len(set(self._seen))


def token_record(ids: list[int], labels: list[int], score: float) -> Record:
    """Return a record of the `tokens` format, of at least one id."""
    return {
        "input_ids": ids,
        "attention_mask": Raw(b"[" + b"1," * (len(ids) - 1) + b"1]"),
        "labels": labels,
        "position_ids": Raw(_positions(len(ids))),
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
    check_mask(ids, labels, where)
    if labels.count(IGNORE_INDEX) == len(labels):
        raise RowError(
            where, "nothing generated", "every position is masked, so there is nothing to train on; drop this response"
        )
    if vocabulary_size is not None:
        check_ids(ids, vocabulary_size, where)
    return ids, labels


def prefix_length(labels: list[int]) -> int:
    """Count the positions before the first that takes loss."""
    return next((at for at, label in enumerate(labels) if label != IGNORE_INDEX), len(labels))


def trained_stretches(labels: list[int]) -> list[tuple[int, int]]:
    """Start and end of each run of positions that take loss.

    >>> trained_stretches([-100, 5, 6, -100, 7])
    [(1, 3), (4, 5)]
    """
    runs = groupby(range(len(labels)), lambda at: labels[at] != IGNORE_INDEX)
    trained = (list(run) for is_trained, run in runs if is_trained)
    return [(run[0], run[-1] + 1) for run in trained]


def decode_runs(tokenizer: "PreTrainedTokenizerBase", chosen: Chosen, index: int) -> list[str]:
    """The text of each stretch that takes loss."""
    ids, labels = ids_and_labels(chosen, index, len(tokenizer))
    return decode_batch(tokenizer, [ids[start:end] for start, end in trained_stretches(labels)])


def decode_batch(tokenizer: "PreTrainedTokenizerBase", rows: list[list[int]]) -> list[str]:
    """The text of each row of ids, special tokens included."""
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _decode_ids(rows: list[Raw] | None, index: int, name: str, where: str) -> list[int]:
    if not rows:
        raise RowError(where, "no token ids recorded", f"no {name} were recorded; this format needs them")
    try:
        return _ids_decoder.decode(rows[index])
    except msgspec.DecodeError as error:
        raise RowError(where, "ids that are no numbers", f"{name} is not a list of whole numbers ({error})") from error


def check_mask(ids: list[int], labels: list[int], where: str) -> None:
    """RowError unless every label is -100 or the id."""
    if len(ids) != len(labels):
        raise RowError(
            where, WRONG_MASK, f"{len(ids)} tokens but {len(labels)} mask values; they must match one to one"
        )
    trained = len(labels) - labels.count(IGNORE_INDEX)
    if labels[len(labels) - trained :] == ids[len(ids) - trained :]:  # a prompt, then what was generated
        return
    for at, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORE_INDEX, token):
            raise RowError(
                where,
                WRONG_MASK,
                f"masks[{at}] is {label} where tokens[{at}] is {token}; "
                f"expected {IGNORE_INDEX} (no loss) or the token id",
            )
