"""Line charts and bar charts as SVG text: no script, no style sheet of their own, safe to put into a page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Literal

WIDTH, HEIGHT = 480, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 58, 24, 22
_BINS = 20
_LETTERS = 12  # height of a line of text
_STEPS = (1, 2, 5, 10)
_NOTHING = f'<text x="{_LEFT}" y="{HEIGHT / 2}">nothing to draw yet</text>'

STYLE = """\
svg { width: 26rem; max-width: 100%; background: #f7f8fa; } svg rect { fill: #3b6fb6; } svg .grid { stroke: #dde; }
svg text { font: 11px system-ui, sans-serif; fill: #445; } svg .title { font-weight: 600; }
svg .value { text-anchor: end; }
"""
"""For pages of bar charts that have no colours of their own."""


@dataclass(frozen=True)
class Series:
    """One line of a chart: (seconds since the epoch or step, value); None, NaN and infinity leave a gap."""

    name: str
    points: Sequence[tuple[float, float | None]]


def line_chart(
    title: str,
    lines: Sequence[Series],
    *,
    unit: str = "",
    top: float = 0.0,
    band: Sequence[tuple[float | None, float | None]] = (),
    over: Literal["time", "steps"] = "time",
) -> str:
    """Draw lines over time or steps, each with its newest value at the right edge.

    Args:
        unit: behind the values of the axis, e.g. "%".
        top: the axis reaches at least this value.
        band: the bounds, low and high, of an area behind the first line, for each of its points.
        over: the horizontal axis.
    """
    lines = [Series(line.name, [(at, _finite(value)) for at, value in line.points]) for line in lines]
    values = [value for line in lines for _, value in line.points if value is not None]
    if len(values) < 2:
        return _svg(title, _NOTHING)
    area = _area(lines[0].points, band)
    start, end = lines[0].points[0][0], lines[0].points[-1][0]
    low, high = min(0.0, *values, *(b for _, b, _ in area)), max(top, *values, *(t for _, _, t in area))
    scale = _Scale(start, end, -axis_top(-low) if low < 0 else 0.0, axis_top(high) if high > 0 else 0.0)
    edge = [scale.place(at, t) for at, _, t in area] + [scale.place(at, b) for at, b, _ in reversed(area)]
    polygon = f'<polygon points="{" ".join(edge)}"/>' if edge else ""
    paths = "".join(
        f'<polyline class="line{number}" points="{" ".join(scale.place(at, value) for at, value in part)}"/>'
        for number, line in enumerate(lines)
        for part in _unbroken(line.points)
    )
    first, last = ("0", span(end - start)) if over == "time" else (f"step {start:.0f}", f"{end:.0f}")
    legend = "".join(
        f'<tspan class="line{number}">{" " * 3 if number else ""}{escape(line.name)}</tspan>'
        for number, line in enumerate(lines if len(lines) > 1 else [])
    )
    return _svg(title, scale.axes(unit, first, last) + polygon + paths + _ends(lines, scale, unit), legend)


def _ends(lines: Sequence[Series], scale: "_Scale", unit: str) -> str:
    """Mark the newest point of each line and write its value at the right edge, none over another."""
    known = ((number, [point for point in line.points if point[1] is not None]) for number, line in enumerate(lines))
    newest = [
        (scale.y(value := points[-1][1] or 0.0), number, points[-1][0], value) for number, points in known if points
    ]
    drawn, free = [], 0.0
    below = scale.y(scale.low) - _LETTERS * (len(newest) - 1)
    for place, (y, number, at, value) in enumerate(sorted(newest)):
        free = max(min(y, below + _LETTERS * place), free)
        text = f"{short(float(f'{value:.3g}'))}{escape(unit)}"
        drawn.append(
            f'<circle class="line{number}" cx="{scale.x(at):.1f}" cy="{y:.1f}" r="2.5"/>'
            f'<text class="line{number}" x="{WIDTH - _RIGHT + 6}" y="{free + 4:.1f}">{text}</text>'
        )
        free += _LETTERS
    return "".join(drawn)


def histogram(title: str, values: Sequence[float]) -> str:
    """Draw how many values lie where between the lowest and the highest; NaN and infinity are left out."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return bar_chart(title, [], [])
    low, high = min(values), max(values)
    if low == high:
        return bar_chart(title, [low, low], [len(values)], f"{len(values):,}, all {short(low)}")
    width = high / _BINS - low / _BINS or 1.0  # so, since the difference of large ones is infinite
    counts = [0] * _BINS
    for value in values:
        counts[min(_BINS - 1, int(value / width - low / width + 1e-9))] += 1
    edges = [low + place * width for place in range(_BINS + 1)]
    return bar_chart(title, edges, counts, f"{len(values):,}, mean {sum(values) / len(values):.3g}")


def bar_chart(title: str, edges: Sequence[float], counts: Sequence[int], note: str = "") -> str:
    """Draw how many values lie between edges: `counts[i]` from `edges[i]` to `edges[i + 1]`.

    Args:
        note: at the right of the title.
    """
    if not counts:
        return _svg(title, _NOTHING)
    first, last = edges[0], edges[-1]
    room = 0.05 * max(1.0, abs(first)) if first == last else 0.0  # the bar of one value stands in the middle
    scale = _Scale(first - 10 * room, last + 10 * room, 0.0, axis_top(max(counts)))
    bars = "".join(
        f'<rect x="{scale.x(left - room):.1f}" y="{(y := scale.y(count)):.1f}" '
        f'width="{scale.x(right + room) - scale.x(left - room) - 1:.1f}" height="{scale.y(0) - y:.1f}">'
        f"<title>{short(left)}{'' if room else f' to {short(right)}'}: {count}</title></rect>"
        for left, right, count in zip(edges, edges[1:], counts, strict=False)
        if count
    )
    axes = scale.axes("", "" if room else short(first), "" if room else short(last))
    return _svg(title, axes + bars, f"<tspan>{escape(note)}</tspan>" if note else "")


@dataclass(frozen=True)
class _Scale:
    """Places of values in the picture."""

    start: float
    end: float
    low: float
    high: float

    def x(self, at: float) -> float:
        return _LEFT + (at - self.start) / ((self.end - self.start) or 1) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def place(self, at: float, value: float) -> str:
        return f"{self.x(at):.1f},{self.y(value):.1f}"

    def axes(self, unit: str, first: str, last: str) -> str:
        """Lines across the picture with their values, and the words at both ends of the horizontal axis."""
        grid = "".join(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{(y := self.y(value)):.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="value">{short(value)}{escape(unit)}</text>'
            for value in (self.low, (self.low + self.high) / 2, self.high)
        )
        ends = f'<text x="{_LEFT}" y="{HEIGHT - 6}">{escape(first)}</text>'
        return f'{grid}{ends}<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 6}" class="value">{escape(last)}</text>'


def _area(
    points: Sequence[tuple[float, float | None]], band: Sequence[tuple[float | None, float | None]]
) -> list[tuple[float, float, float]]:
    """Return (at, bottom, top) where value and bounds are known."""
    bounds = ((at, value, _finite(low), _finite(high)) for (at, value), (low, high) in zip(points, band, strict=False))
    return [
        (at, low, high) for at, value, low, high in bounds if value is not None and low is not None and high is not None
    ]


def _finite(value: float | None) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def axis_top(highest: float) -> float:
    """The next round number: 1, 2 or 5 times a power of ten.

    >>> axis_top(0.3), axis_top(101.0), axis_top(0.0)
    (0.5, 200.0, 1.0)
    """
    if highest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest))
    return next(round(step * power, 12) for step in _STEPS if step * power >= highest * (1 - 1e-9))


def short(value: float) -> str:
    """A number as short as an axis needs it.

    >>> short(0.5), short(100.0), short(12000.0), short(2500000.0)
    ('0.5', '100', '12k', '2.5M')
    """
    if value < 0:
        return "-" + short(-value)
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


def _unbroken(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """The stretches between gaps."""
    parts = groupby(points, key=lambda point: point[1] is not None)
    return [[(at, value or 0.0) for at, value in part] for is_known, part in parts if is_known]


def _svg(title: str, content: str, legend: str = "") -> str:
    """The picture with its title at the left of the top and the legend, `tspan`s, at the right."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text x="{_LEFT}" y="15" class="title">{escape(title)}</text>{content}'
        f'<text x="{WIDTH - 8}" y="15" class="value" xml:space="preserve">{legend}</text></svg>'
    )
