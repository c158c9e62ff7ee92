"""Takes the matrices that are surely good out of a JSON body, so that no parser has to walk through them.

Putting a string in the place of a value leaves a text JSON exactly if it was JSON before: `"tokens":` with these
quotes can only stand before a value. The string is random, so it cannot stand there already.
"""

import re
import secrets
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from atroposlib.api.number_rows import proven_rows

Body: TypeAlias = bytes | memoryview

INTEGER_ROWS: tuple[str, ...] = ("tokens", "masks")
FLOAT_ROWS: tuple[str, ...] = ("advantages", "ref_logprobs", "inference_logprobs")
_KEY = re.compile(rb'"(%s)"\s*:\s*(?=\[\[)' % "|".join(INTEGER_ROWS + FLOAT_ROWS).encode())
WORTH_BYTES = 1 << 14
"""A smaller matrix is parsed in less time than it takes to ask numpy a hundred things."""

_SEARCHED = 1 << 18
_TAIL = 64  # between the end of a matrix and the next key lie a few characters


@dataclass(slots=True)
class Matrix:
    """A matrix that was proven good, as it stands in the body, and its row lengths."""

    text: memoryview
    lengths: list[int]


@dataclass(slots=True)
class Lifted:
    """What is left of a body, and what was taken out by the JSON string that stands in its place."""

    rest: bytes = b""
    matrices: dict[bytes, Matrix] = field(default_factory=dict)


def lift_matrices(body: Body) -> Lifted:
    """Take out one large matrix after the other until one is in doubt; it and what follows stay in the rest."""
    if len(body) < WORTH_BYTES:
        return Lifted(bytes(body))
    text, lifted, parts, copied, end = memoryview(body), Lifted(), [], 0, 0
    while (key := _KEY.search(text, end)) is not None:
        start, name = key.end(), key[1].decode()
        matrix = _matrix_text(text, start)
        end = start + len(matrix)
        if len(matrix) < WORTH_BYTES:
            continue
        lengths = proven_rows(matrix, integers=name in INTEGER_ROWS, signed=name != "tokens")
        if lengths is None:
            break  # looking on from its start could cost the square of the body's length
        mark = b'"%s"' % secrets.token_hex(16).encode()
        lifted.matrices[mark] = Matrix(matrix, lengths)
        parts += (text[copied:start], mark)
        copied = end
    lifted.rest = b"".join([*parts, text[copied:]])
    return lifted


def _matrix_text(text: memoryview, start: int) -> memoryview:
    """What is a matrix if one begins at `start`; empty if surely none does."""
    stop = _next_quote(text, start)  # numbers have none, so this is the next key or the end of the body
    tail = max(start, stop - _TAIL)
    end = bytes(text[tail:stop]).rfind(b"]]")
    return text[start : tail + end + 2] if end >= 0 else text[start:start]


def _next_quote(text: memoryview, start: int) -> int:
    codes = np.frombuffer(text, np.uint8)
    for at in range(start, codes.size, _SEARCHED):
        found = codes[at : at + _SEARCHED] == ord('"')
        if found[first := int(found.argmax())]:
            return at + first
    return codes.size
