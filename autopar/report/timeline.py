"""The timeline of a plan's step as text: one row for each pipeline rank, one letter a phase."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost_model.plan_timeline import simulate_plan
from autopar.cost_model.schedule import traits
from autopar.formatting.table import WIDTH, format_seconds
from autopar.ir.plan_data import PlanData

# the phases after a rank's last backward, once a step
ONCE = {"S": "gradient synchronisation", "O": "optimizer"}
IDLE, MIXED, CUT = ".", "+", "…"
_CLEAR_PART = 0.8  # the part of a column's time that a phase needs to name the column
_MAX_DRAWN_PART = 0.8  # a cut-out is worth it if at most this part of the step remains
_MIN_COLUMNS = 2  # with narrower forwards, a piece of the steady part is cut out


class Span(NamedTuple):
    """A phase of one pipeline rank, from ``start`` to ``end`` in seconds.

    ``stage`` and ``microbatch`` are None for a phase that runs once a step.
    """

    letter: str
    start: float
    end: float
    stage: int | None = None
    microbatch: int | None = None


def phase_spans(plan: PlanData) -> list[list[Span]]:
    """The phases of each pipeline rank in a step."""
    line, found = simulate_plan(plan), []
    for rank in range(plan.pipeline):
        row = [
            Span(action.kind, start, end, action.stage, action.microbatch)
            for _, action, start, end in line.row(rank)
        ]
        for letter, kind in ONCE.items():
            start = row[-1].end
            row.append(
                Span(
                    letter,
                    start,
                    start
                    + sum(
                        stage.seconds.get(kind, 0.0) for stage in plan.stages[rank :: plan.pipeline]
                    ),
                )
            )
        found.append(row)
    return found


def draw_timeline(plan: PlanData, most: int | None = None) -> str:
    """The timeline as text, with a legend.

    Args:
        plan: the plan.
        most: the most rows; of more ranks the middle ones are left out.
    """
    rows = phase_spans(plan)
    label = len(f"rank {plan.pipeline - 1}")
    window = _window(rows, WIDTH - label - 2)
    drawn = [
        f"{f'rank {rank}':<{label}}  {window.draw(row, plan.pipeline)}"
        for rank, row in enumerate(rows)
    ]
    if most is not None and len(drawn) > most:
        drawn[most // 2 : len(drawn) - most // 2] = [CUT]
    title = (
        f"timeline of a step: {format_seconds(window.total)}, one column "
        f"{format_seconds(1 / window.scale if window.scale else 0.0)}"
    )
    return "\n".join([title, *drawn, *_legend(plan, window)])


def _legend(plan: PlanData, window: Window) -> list[str]:
    is_split = traits(
        plan.schedule, plan.pipeline, plan.chunks, plan.microbatches
    ).has_split_backward
    backward = "B backward for inputs, W for weights" if is_split else "B backward"
    words = [f"F forward, {backward}, S {ONCE['S']}, O {ONCE['O']}, {IDLE} waiting"]
    if window.numbers:
        words.append("the number is the microbatch's")
    if plan.chunks > 1:
        words.append("small letters: every second stage of a rank")
    if window.dense:
        words.append(f"{MIXED} several in turn")
    if window.left_out:
        words.append(f"{CUT} {format_seconds(window.left_out)} of the same left out")
    return textwrap.wrap("; ".join(words), WIDTH)


@dataclass(frozen=True)
class Window:
    """The parts of the step that are drawn.

    Attributes:
        parts: (start, end) of one or two parts, in seconds.
        scale: columns for one second.
        total: seconds of the whole step.
        numbers: whether there is room for the numbers of microbatches.
        dense: whether phases are narrower than a column.
    """

    parts: tuple[tuple[float, float], ...]
    scale: float
    total: float
    numbers: bool
    dense: bool

    @property
    def left_out(self) -> float:
        return self.total - sum(end - start for start, end in self.parts)

    def draw(self, row: Sequence[Span], pipeline: int) -> str:
        paint = self._shares if self.dense else self._letters
        return CUT.join(
            "".join(paint(row, start, self._columns(end - start), pipeline))
            for start, end in self.parts
        )

    def _columns(self, time: float) -> int:
        return int(time * self.scale + 0.5)

    def _letters(self, row: Sequence[Span], since: float, columns: int, pipeline: int) -> list[str]:
        """Draws each phase over the columns whose middle it covers."""
        cells = [IDLE] * columns
        for span in row:
            first, last = (self._columns(max(time - since, 0.0)) for time in (span.start, span.end))
            for i in range(first, min(last, columns)):
                cells[i] = self._text(
                    span,
                    pipeline,
                    i - self._columns(span.start - since) if span.start >= since else -1,
                )
        return cells

    def _text(self, span: Span, pipeline: int, place: int) -> str:
        """The character at one place of a phase: its letter, then its number, then dashes."""
        letter = _letter(span, pipeline)
        text = (
            letter if span.microbatch is None or not self.numbers else f"{letter}{span.microbatch}"
        )
        if len(text) == 1:
            return letter
        return text[place] if 0 <= place < len(text) else "-"

    def _shares(
        self, row: Sequence[Span], since: float, columns: int, pipeline: int
    ) -> Iterator[str]:
        """Draws in each column the letter of the phase that takes most of its time."""
        shares: list[dict[str, float]] = [{} for _ in range(columns)]
        for span in row:
            start, end = (span.start - since) * self.scale, (span.end - since) * self.scale
            for i in range(max(int(start), 0), min(int(end) + 1, columns)):
                letter = _letter(span, pipeline)
                shares[i][letter] = shares[i].get(letter, 0.0) + max(
                    min(end, i + 1) - max(start, i), 0.0
                )
        for share in shares:
            share[IDLE] = 1.0 - sum(share.values())
            best = max(share, key=lambda letter: share[letter])
            yield best if share[best] >= _CLEAR_PART else MIXED


def _letter(span: Span, pipeline: int) -> str:
    return (
        span.letter.lower()
        if span.stage is not None and span.stage // pipeline % 2
        else span.letter
    )


def _window(rows: Sequence[Sequence[Span]], columns: int) -> Window:
    """The whole step, or the step without a piece of the steady part.

    A piece is cut out where forwards would be too narrow to read, if that helps.
    """
    total = max(row[-1].end for row in rows)
    if not total:
        return Window(((0.0, 0.0),), 0.0, 0.0, False, False)
    forwards = [span.end - span.start for row in rows for span in row if span.letter == "F"]
    mean = sum(forwards) / len(forwards)
    # columns of a letter, a number and a dash
    readable = 2 + len(str(max(span.microbatch or 0 for row in rows for span in row)))
    parts: tuple[tuple[float, float], ...] = ((0.0, total),)
    scale = columns / total
    if mean * scale < _MIN_COLUMNS:
        warm = next(span.end for span in rows[0] if span.letter == "B")
        drain = total - max(span.start for span in rows[0] if span.letter == "F")
        period = (rows[0][-1].end - warm) / max(sum(span.letter == "F" for span in rows[0]), 1)
        least = warm + drain + 2 * period
        if least < _MAX_DRAWN_PART * total:
            scale = min(readable / mean, (columns - 1) / least)
            spare = max((columns - 1) / scale - least, 0.0) / 2
            parts = ((0.0, warm + period + spare), (total - drain - period - spare, total))
    return Window(parts, scale, total, mean * scale >= readable, mean * scale < 1)
