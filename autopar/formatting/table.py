"""Tables and units of a report, at most WIDTH columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import MIN_PADDING, tabulate  # the padding of a header that is wider than its column

WIDTH = 120
MOST_ROWS = 32  # stages or ranks that a table shows before it leaves out the middle
_SPACE = 2  # columns between two of a table

Cells = list[str]


def table(rows: list[Cells], headers: Cells, align: str, flexible: Sequence[int] = ()) -> str:
    """A table of at most WIDTH columns.

    Args:
        rows, headers: the cells.
        align: "l" or "r" for each column.
        flexible: the columns that are cut first where the table is too wide; then the widest are.
    """
    everything = [headers, *rows]
    widths = [max(len(row[i]) for row in everything) for i in range(len(headers))]
    room = (
        WIDTH
        - _SPACE * (len(headers) - 1)
        - sum(max(0, len(h) + MIN_PADDING - w) for h, w in zip(headers, widths, strict=True))
    )
    for i in (*flexible, *sorted(range(len(headers)), key=lambda i: -widths[i])):
        if sum(widths) > room:
            widths[i] = max(min(widths[i], 14), widths[i] - (sum(widths) - room))
    cells = [
        [truncate(cell, width) for cell, width in zip(row, widths, strict=True)]
        for row in everything
    ]
    names = {"l": "left", "r": "right"}
    return tabulate(
        cells[1:],
        cells[0],
        "simple",
        disable_numparse=True,
        colalign=[names[a] for a in align],
        preserve_whitespace=True,
    )


def truncate(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 1] + "…"


def format_seconds(value: float) -> str:
    """A time with three significant digits: ``12.3 ms``."""
    return _scaled(value, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")])


def format_bytes(value: float) -> str:
    """An amount of memory with three significant digits: ``1.5 GiB``."""
    return _scaled(value, [(2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")])


def format_count(value: float) -> str:
    """A number with three significant digits: ``8.03 billion``."""
    return _scaled(value, [(1e9, "billion"), (1e6, "million"), (1.0, "")]).strip()


def _scaled(value: float, units: list[tuple[float, str]]) -> str:
    scale, name = next(((s, n) for s, n in units if abs(value) >= s), units[-1])
    number = value / scale
    return (
        f"{number:.0f} {name}"
        if abs(number) >= 100 or number == round(number)
        else f"{number:.3g} {name}"
    )


def first_and_last(rows: Sequence[Cells], most: int) -> list[Cells]:
    """``rows``; of more than ``most`` rows the first and the last, with a row of dots between."""
    if len(rows) <= most:
        return list(rows)
    return [*rows[: most // 2], ["…", *[""] * (len(rows[0]) - 1)], *rows[len(rows) - most // 2 :]]
