"""Line charts beside each other as an SVG, for curves that may lie on each other: the first is a
broad band, the others alternate on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

BAND, COLOURS = (
    "#c8c8c8",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"),
)  # Okabe and Ito: told apart by all eyes
WIDTH, HEIGHT, MARGIN, DASH = 300, 200, 48, 5  # in pixels; a chart without its margin


@dataclass(frozen=True)
class Chart:
    """Curves by name. A curve's points are evenly spaced over an x axis from 0 to ``end``, and the
    last lies there.
    """

    title: str
    x: str
    end: int
    curves: Mapping[str, Sequence[float]]
    logarithmic: bool = False


def svg(charts: Sequence[Chart]) -> str:
    """The charts from left to right, above one legend."""
    names = list(charts[0].curves)
    across, down = len(charts) * (WIDTH + 2 * MARGIN), HEIGHT + 2 * MARGIN + 20
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" '
        'font-family="sans-serif" font-size="11">'
    )
    parts = [head, f'<rect width="{across}" height="{down}" fill="white"/>']
    for place, chart in enumerate(charts):
        parts += [
            f'<g transform="translate({place * (WIDTH + 2 * MARGIN) + MARGIN},{MARGIN})">',
            *_chart(chart, names),
            "</g>",
        ]
    for i, name in enumerate(names):
        x, y = MARGIN + 110 * i, down - 14
        parts += [_line([(x, y), (x + 24, y)], i, 1), _text(x + 30, y + 4, name, "start")]
    return "\n".join([*parts, "</svg>\n"])


def _chart(chart: Chart, names: list[str]) -> list[str]:
    positive = [v for curve in chart.curves.values() for v in curve if v > 0] or [1.0]
    high = math.ceil(math.log10(max(positive)) if chart.logarithmic else max(positive))
    low = math.floor(math.log10(min(positive))) if chart.logarithmic else 0
    ticks = (
        [float(low + i) for i in range(high - low + 1)]
        if chart.logarithmic
        else [high * i / 4 for i in range(5)]
    )

    def place(value: float) -> float:
        """Of a value, or the exponent of one, on the y axis; zero lies at the bottom also where
        there is none.
        """
        return HEIGHT * (1 - (value - low) / max(1, high - low))

    def height(value: float) -> float:
        return (
            place(value)
            if not chart.logarithmic
            else place(math.log10(value))
            if value > 0
            else HEIGHT
        )

    parts = [_text(WIDTH / 2, -16, chart.title), _text(WIDTH / 2, HEIGHT + 32, chart.x)]
    for tick in ticks:
        parts.append(f'<path d="M0 {place(tick):.1f}H{WIDTH}" stroke="#eee"/>')
        parts.append(
            _text(-6, place(tick) + 4, f"1e{tick:.0f}" if chart.logarithmic else f"{tick:g}", "end")
        )
    parts += [
        _text(WIDTH * i / chart.end, HEIGHT + 15, str(i))
        for i in range(0, chart.end + 1, -(-chart.end // 10))
    ]
    for name, curve in chart.curves.items():
        points = [(WIDTH * (i + 1) / len(curve), height(value)) for i, value in enumerate(curve)]
        parts.append(_line(points, names.index(name), len(names) - 1))
    return parts


def _line(points: list[tuple[float, float]], index: int, sharing: int) -> str:
    """The first curve is a band; each of the ``sharing`` others is drawn where the rest have
    gaps.
    """
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    if index == 0:
        return (
            f'<polyline points="{path}" fill="none" stroke="{BAND}" stroke-width="6" '
            'stroke-linejoin="round"/>'
        )
    dashes = (
        f'stroke-dasharray="{DASH} {DASH * (sharing - 1)}" '
        f'stroke-dashoffset="{-DASH * (index - 1)}"'
        if sharing > 1
        else ""
    )
    return (
        f'<polyline points="{path}" fill="none" stroke="{COLOURS[(index - 1) % len(COLOURS)]}" '
        f'stroke-width="2" {dashes}/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
