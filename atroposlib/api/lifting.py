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
_SEARCHED = 1 << 16
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
    """Take out one matrix after the other until one is in doubt; it and what follows stay in the rest."""
    text, lifted, parts, end = memoryview(body), Lifted(), [], 0
    while (key := _KEY.search(text, end)) is not None:
        matrix = _matrix_at(text, key.end(), key[1].decode())
        if matrix is None:
            break  # looking on could cost the square of the body's length
        mark = b'"%s"' % secrets.token_hex(16).encode()
        lifted.matrices[mark] = matrix
        parts += (text[end : key.end()], mark)
        end = key.end() + len(matrix.text)
    lifted.rest = b"".join([*parts, text[end:]])
    return lifted


def _matrix_at(text: memoryview, start: int, name: str) -> Matrix | None:
    """The matrix that begins at `start`; None when in doubt."""
    stop = _next_quote(text, start)  # numbers have none, so this is the next key or the end of the body
    tail = max(start, stop - _TAIL)
    end = bytes(text[tail:stop]).rfind(b"]]")
    if end < 0:
        return None
    matrix = text[start : tail + end + 2]
    lengths = proven_rows(matrix, integers=name in INTEGER_ROWS, signed=name != "tokens")
    return None if lengths is None else Matrix(matrix, lengths)


def _next_quote(text: memoryview, start: int) -> int:
    codes = np.frombuffer(text, np.uint8)
    for at in range(start, codes.size, _SEARCHED):
        found = codes[at : at + _SEARCHED] == ord('"')
        if found.any():
            return at + int(found.argmax())
    return codes.size
