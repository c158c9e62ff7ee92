"""Is a mathematical answer right? Called in a sandbox worker, since math-verify may take for ever on odd input."""


def load(_: str) -> None:
    """Import math-verify."""
    import math_verify  # noqa: F401


def is_right(output: str, gold: str) -> bool:
    """The last \\boxed{} after the thinking equals `gold`; False when there is none or it cannot be read.

    Args:
        output: the model's whole reply; everything up to the last </think> is left out.
        gold: the right answer, a number or LaTeX.
    """
    from math_verify import parse, verify

    answer = last_boxed(output.rpartition("</think>")[2])
    if answer is None:
        return False
    # The sandbox limits the time; math-verify's own limits would use the alarm that the worker needs.
    right = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not right:
        raise ValueError(f"the right answer {gold!r} is no number or expression")
    given = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return bool(given) and bool(verify(right, given, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{} holds, inner braces included; None when there is none or it is not closed.

    >>> last_boxed(r"\\boxed{1} or \\boxed{\\frac{1}{2}}")
    '\\\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{") + len("\\boxed{")
    if start < len("\\boxed{"):
        return None
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip() or None
    return None
