"""Looking for a text in what was said, without decoding the conversations that cannot hold it."""

import re
from collections.abc import Iterator

import msgspec

from atroposlib.data.lazy_group import LazyGroup

_SAME_IN_JSON = re.compile(r"[A-Za-z0-9 ,.:;()-]+")
"""Characters that stand for themselves in JSON, whoever wrote it."""


class SearchText:
    """A text to look for in prompts and answers; upper and lower case are the same."""

    def __init__(self, text: str) -> None:
        self._folded = text.casefold()
        longest = max(_SAME_IN_JSON.findall(text) or [""], key=len)
        self._bytes = longest.lower().encode()

    def is_in(self, group: LazyGroup, index: int) -> bool:
        """Return True when a message of response `index` holds the text, in whichever key but its role."""
        raw = bytes(group.messages[index]) if group.messages else b""
        if not raw or self._bytes not in raw.lower():
            return False
        return any(self._folded in text.casefold() for text in _texts(msgspec.json.decode(raw)))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key != "role":
                yield from _texts(each)
