"""Line charts as SVG text: no script, no style sheet of their own, safe to put into a page as they are."""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 480, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 24, 22
_STEPS = (1, 2, 5, 10)


def line_chart(title: str, points: Sequence[tuple[float, float | None]], *, unit: str = "", top: float = 0.0) -> str:
    """One line over time.

    Args:
        points: (seconds since the epoch, value); None leaves a gap.
        unit: behind the values of the axis, e.g. "%".
        top: the axis reaches at least this value.
    """
    label = f'<text x="{_LEFT}" y="15" class="title">{escape(title)}</text>'
    known = [(at, value) for at, value in points if value is not None]
    if len(known) < 2:
        return _svg(title, label + f'<text x="{_LEFT}" y="{HEIGHT / 2}">nothing to draw yet</text>')
    start, end = points[0][0], points[-1][0]
    highest = axis_top(max(top, *(value for _, value in known)))

    def place(at: float, value: float) -> str:
        x = _LEFT + (at - start) / ((end - start) or 1) * (WIDTH - _LEFT - _RIGHT)
        y = HEIGHT - _BOTTOM - value / highest * (HEIGHT - _TOP - _BOTTOM)
        return f"{x:.1f},{y:.1f}"

    grid = "".join(
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{(y := _height_of(share)):.1f}" y2="{y:.1f}" class="grid"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="value">{short(share * highest)}{escape(unit)}</text>'
        for share in (0.0, 0.5, 1.0)
    )
    lines = "".join(
        f'<polyline points="{" ".join(place(at, value) for at, value in part)}"/>' for part in _unbroken(points)
    )
    base = HEIGHT - 6
    times = (
        f'<text x="{_LEFT}" y="{base}">0</text>'
        f'<text x="{WIDTH - _RIGHT}" y="{base}" class="value">{span(end - start)}</text>'
    )
    return _svg(title, label + grid + lines + times)


def axis_top(highest: float) -> float:
    """The next round number: 1, 2 or 5 times a power of ten.

    >>> axis_top(0.3), axis_top(101.0), axis_top(0.0)
    (0.5, 200.0, 1.0)
    """
    if highest <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= highest:
        power *= 10
    while power > highest:
        power /= 10
    return next(round(step * power, 12) for step in _STEPS if step * power >= highest * (1 - 1e-9))


def short(value: float) -> str:
    """A number as short as an axis needs it.

    >>> short(0.5), short(100.0), short(12000.0), short(2500000.0)
    ('0.5', '100', '12k', '2.5M')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def span(seconds: float) -> str:
    """A stretch of time in its largest unit.

    >>> span(45), span(300), span(9000), span(260000)
    ('45 s', '5 min', '2.5 h', '3.01 d')
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def _height_of(share: float) -> float:
    return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _unbroken(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """The stretches between gaps."""
    parts: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is not None:
            parts[-1].append((at, value))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _svg(title: str, content: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{content}</svg>'
