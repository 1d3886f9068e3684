"""A small SVG picture, made of boxes, texts and arrows.

Each picture has a light background of its own, so that its text is readable on light and on dark
pages.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

RANK = ("#a6cee3", "#fdbf6f", "#b2df8a", "#cab2d6", "#8fd0c8", "#f4a8b4", "#d9c79b", "#b8bfc8")
PLAIN, NODE, PENDING = "#ffffff", "#eef1f6", "#f7d9d9"
WIRE, INK, FAINT = "#5c677d", "#1d2433", "#56607a"
Draw = Callable[[], "Picture"]
PICTURES: dict[str, Draw] = {}


def picture(function: Draw) -> Draw:
    """Adds a function to those whose pictures are written, under the function's name."""
    PICTURES[function.__name__.replace("_", "-")] = function
    return function


class Picture:
    """An SVG picture. Sizes are in pixels; y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{WIRE}"/>'
            "</marker></defs>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" '
            'fill="#fbfcfe" stroke="#d5dae3"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        text: str = "",
        fill: str = NODE,
        size: int = 13,
        dashed: bool = False,
    ) -> None:
        """A rectangle with ``text`` in its middle; line breaks in the text are kept."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" '
            f'fill="{fill}" stroke="{WIRE}"{dashes}/>'
        )
        lines = text.split("\n") if text else []
        first = y + h / 2 - (len(lines) - 1) / 2 * size * 1.25
        for i, line in enumerate(lines):
            self.text(x + w / 2, first + i * size * 1.25, line, size=size)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "middle",
        size: int = 13,
        bold: bool = False,
        fill: str = INK,
    ) -> None:
        """One line of text, centred on ``y``."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y + size * 0.35:.4g}" text-anchor="{anchor}" '
            f'font-size="{size}" fill="{fill}"{weight}>{escape(text)}</text>'
        )

    def note(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        """A small, pale line of text, centred on ``y``."""
        self.text(x, y, text, anchor, 12, fill=FAINT)

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        text: str = "",
        bend: float = 0,
        wide: float = 1.4,
        both: bool = False,
    ) -> None:
        """An arrow whose middle is ``bend`` pixels lower, with ``text`` above its middle."""
        x, y = (x1 + x2) / 2, (y1 + y2) / 2
        start = ' marker-start="url(#tip)"' if both else ""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g}Q{x:g} {y + bend:g} {x2:g} {y2:g}" fill="none" '
            f'stroke="{WIRE}" stroke-width="{wide:g}" marker-end="url(#tip)"{start}/>'
        )
        if text:
            self.text(x, y + bend / 2 - 9, text, size=11, fill=FAINT)

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])
