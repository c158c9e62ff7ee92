"""Text of the ids of a byte-level tokenizer (GPT-2, Llama 3, Qwen, ...): every token stands for some bytes.

The Rust tokenizer makes a string of each token and takes the strings apart again; joining the bytes of the tokens is
three times as fast and gives the same.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class ByteText:
    """`decode` of one byte-level tokenizer. Tokens are looked up when they are first seen."""

    def __init__(self, backend: "Backend", special: Collection[int]) -> None:
        self._bytes = _TokenBytes(backend, ())
        self._plain_bytes = _TokenBytes(backend, special)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids; unknown ids have none, and bytes that are not UTF-8 become U+FFFD."""
        table = self._plain_bytes if skip_special_tokens else self._bytes
        return b"".join(map(table.__getitem__, ids)).decode("utf-8", "replace")


class _TokenBytes(dict[int, bytes]):
    """The bytes of each id, b"" for those that are skipped."""

    def __init__(self, backend: "Backend", skipped: Collection[int]) -> None:
        super().__init__(dict.fromkeys(skipped, b""))
        self._backend = backend
        self._alphabet = _alphabet()

    def __missing__(self, token: int) -> bytes:
        letters = self._backend.id_to_token(token)
        if letters is None:
            return b""  # not kept: it may be added later
        try:
            known = bytes(map(self._alphabet.__getitem__, letters))
        except KeyError:  # an added token may hold any letter
            known = letters.encode()
        self[token] = known
        return known


def is_byte_level(backend: "Backend") -> bool:
    """Whether a token's text is its bytes, in the alphabet of byte-level tokenizers, and nothing comes after that."""
    from tokenizers.decoders import ByteLevel

    return type(backend.decoder) is ByteLevel


def _alphabet() -> dict[str, int]:
    """The byte that each letter stands for: visible ones for themselves, letters from U+0100 on for the others."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    visible = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = (byte for byte in range(256) if chr(byte) not in visible)
    return visible | dict(zip(letters[len(visible) :], others, strict=True))
