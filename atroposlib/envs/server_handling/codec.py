"""From text to ids and back, at the cost of the Rust tokenizer alone where the tokenizer is a plain wrapper of it.

transformers' `encode` and `decode` spend several times as long on their arguments as on the text. A tokenizer that does
more than call its backend (a subclass with its own methods, one that cleans up spaces) must be called as it is.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_PROBE = "Is this n't a probe , it 's one ! \n 1 . 2 ?"
"""Text that a clean-up of spaces would change."""


class Decoder(Protocol):
    """Ids to text."""

    def decode(self, tokens: list[int], /, *, skip_special_tokens: bool = False) -> str: ...


class Tokenizer(Decoder, Protocol):
    """The part of a Hugging Face tokenizer that is needed."""

    eos_token_id: int | None
    bos_token_id: int | None

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...


class Codec:
    """`encode` and `decode` of one tokenizer, with the same results. Special tokens added later are not noticed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)
        self._special: frozenset[int] | None = None
        self._decoder: Decoder = tokenizer
        if self._backend is not None:
            marked = _special_ids(self._backend)
            self._special = marked if tokenizer.eos_token_id is None else marked | {tokenizer.eos_token_id}
            self._decoder = self._backend

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text."""
        backend = self._backend
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of ids."""
        return self._decoder.decode(ids, skip_special_tokens=skip_special_tokens)

    def split_tail(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Generated ids as (body, end tokens): the special tokens at the very end, such as `<|im_end|>`."""
        end = len(ids)
        while end > 0 and self._is_special(ids[end - 1]):
            end -= 1
        return (ids, []) if end == len(ids) else (ids[:end], ids[end:])

    def _is_special(self, token: int) -> bool:
        if self._special is not None:
            return token in self._special
        if token == self._tokenizer.eos_token_id:
            return True
        return self._tokenizer.decode([token], skip_special_tokens=True) == "" != self._tokenizer.decode([token])


@lru_cache(maxsize=8)
def codec_of(tokenizer: Tokenizer) -> Codec:
    """The codec of a tokenizer; made once."""
    return Codec(tokenizer)


def _plain_backend(tokenizer: Any) -> "Backend | None":
    """The Rust tokenizer if `tokenizer` adds nothing to it, else None."""
    if not hasattr(type(tokenizer), "backend_tokenizer"):
        return None
    from transformers import PreTrainedTokenizerFast as Plain  # loaded already: a tokenizer of its kind is here

    methods = ("encode", "decode", "_encode_plus", "_decode")
    if any(getattr(type(tokenizer), name) is not getattr(Plain, name) for name in methods):
        return None
    backend = tokenizer.backend_tokenizer
    ids = tokenizer.encode(_PROBE, add_special_tokens=False)
    same = backend.encode(_PROBE, add_special_tokens=False).ids == ids and backend.decode(ids) == tokenizer.decode(ids)
    return backend if same else None


def _special_ids(backend: "Backend") -> frozenset[int]:
    return frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)
