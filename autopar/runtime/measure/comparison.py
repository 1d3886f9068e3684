"""A plan's predictions beside the measurements of its steps: as a table, as a file, and as input of
:meth:`Cluster.calibrated`.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.formatting.files import write_json
from autopar.formatting.table import (
    MOST_ROWS,
    WIDTH,
    first_and_last,
    format_bytes,
    format_seconds,
    table,
)

VERSION = 1
STEP, OTHER, TOTAL, MEMORY = "step", "other", "total", "peak memory"


@dataclass(frozen=True)
class Row:
    """One number, predicted and measured.

    Attributes:
        where: "step"; "stage 0", …; or "rank 0", … of the pipeline.
        what: a kind of :attr:`Plan.seconds`, "forward", "backward", "waiting", "peak memory", …
        predicted, measured: seconds; bytes of "peak memory". None: there is no number.
    """

    where: str
    what: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured divided by predicted; None if one of them is missing."""
        return (
            self.measured / self.predicted if self.predicted and self.measured is not None else None
        )


@dataclass(frozen=True)
class Comparison:
    """The result of :meth:`Compiled.compare`. Times are medians over steps, and means over ranks
    with the same pipeline rank. Memory is the maximum over these ranks.

    The times of "step" are those of the pipeline rank with the most work, and add up. The times of
    a stage are those of all microbatches of a step; its "forward" and "backward" exclude its
    "conversions". Conversions that the backward recomputes are predicted as compute.

    Attributes:
        cluster: the name of the cluster that the plan was made for.
        fingerprint, world_size: those of the plan.
        steps: the number of counted steps, on the rank with the fewest.
        rows: all numbers.
        links: of the predicted seconds of "compute", "conversions" and "gradient synchronisation",
            the part that messages between devices take.
        hidden: of messages of "gradient synchronisation" that computation hides, pairs of their
            seconds and of the computation's. The prediction saves the smaller one of each pair.
    """

    cluster: str
    fingerprint: str
    world_size: int
    steps: int
    rows: tuple[Row, ...]
    links: dict[str, float]
    hidden: tuple[tuple[float, float], ...] = ()

    @property
    def predicted(self) -> dict[str, float]:
        """Predicted seconds of a step by kind, and their "total"."""
        return {
            row.what: row.predicted
            for row in self.rows
            if row.where == STEP and row.predicted is not None
        }

    @property
    def measured(self) -> dict[str, float]:
        """Measured seconds of a step by kind, and their "total"."""
        return {
            row.what: row.measured
            for row in self.rows
            if row.where == STEP and row.measured is not None
        }

    def numbers(self) -> dict[str, float]:
        """All numbers under flat names, for a logger: "step/compute/predicted", "step/compute/
        measured", "rank 0/peak memory/measured", … in seconds and bytes. What is missing is left
        out.
        """
        return {
            f"{row.where}/{row.what}/{kind}": value
            for row in self.rows
            for kind, value in (("predicted", row.predicted), ("measured", row.measured))
            if value is not None
        }

    def __str__(self) -> str:
        ratio = (
            self.measured[TOTAL] / self.predicted[TOTAL] if self.predicted[TOTAL] else float("inf")
        )
        parts = [
            f"predicted {format_seconds(self.predicted[TOTAL])} a step, measured "
            f"{format_seconds(self.measured[TOTAL])} ({ratio:.2f} times as long): "
            f"median of {self.steps} steps on {self.world_size} "
            f"device{'s' * (self.world_size > 1)} of {self.cluster}",
            _table("time of a step", [row for row in self.rows if row.where == STEP], places=False),
            _table(
                "in a step",
                [row for row in self.rows if row.where != STEP and row.what != MEMORY],
                places=True,
            ),
            _table(
                MEMORY,
                [
                    Row("", row.where, row.predicted, row.measured)
                    for row in self.rows
                    if row.what == MEMORY
                ],
                places=False,
            ),
            textwrap.fill(self._legend(), WIDTH),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _legend(self) -> str:
        words = [
            "ratio: measured to predicted; other: between calls (batches, reading the loss), "
            "which is predicted as part of optimizer"
        ]
        if any(row.where.startswith("rank") and row.what == "waiting" for row in self.rows):
            words.append("waiting: for other ranks of the pipeline and their tensors")
        if any(row.what == MEMORY and row.measured is None for row in self.rows):
            words.append(
                "memory was not measured: on a CPU that takes one step more, compare(sample)"
            )
        return "; ".join(words)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the comparison as JSON: the whole file or nothing."""
        write_json(path, {"version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Comparison:
        """Reads a file that :meth:`save` wrote. Raises :class:`PlanError` if the file holds no
        comparison, is damaged, or has another version.
        """
        name = os.fspath(path)
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            version = data.pop("version")
        except OSError as e:
            raise PlanError(
                f"cannot read the comparison {name}: {e.strerror}; Comparison.save writes one"
            ) from e
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise PlanError(f"{name} is no comparison: {e!r}. Comparison.save writes one") from e
        if version != VERSION:
            raise PlanError(
                f"{name} has comparison version {version}, this autopar reads {VERSION}: compare "
                "again"
            )
        try:
            pairs = tuple((a, b) for a, b in data.get("hidden", ()))
            rows = tuple(Row(**row) for row in data["rows"])
            found = Comparison(**{**data, "rows": rows, "hidden": pairs})
            _check(found)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise PlanError(
                f"{name} is a damaged comparison: {e!r}. Compare again, or undo the edit"
            ) from e
        return found


def _check(found: Comparison) -> None:
    numbers = [n for row in found.rows for n in (row.predicted, row.measured) if n is not None]
    hidden = (n for pair in found.hidden for n in pair)
    for n in (*numbers, *found.links.values(), *hidden, found.steps, found.world_size):
        if isinstance(n, bool) or not isinstance(n, (int, float)):
            raise ValueError(f"{n!r} is no number")
    for name, kinds in (("predicted", found.predicted), ("measured", found.measured)):
        if missing := {"compute", "optimizer", TOTAL} - set(kinds):
            raise ValueError(f"no {name} {', '.join(sorted(missing))} of a step")


def _table(title: str, rows: Sequence[Row], places: bool) -> str:
    if not rows:
        return ""
    cells = []
    for row in rows:
        unit: Any = format_bytes if title == MEMORY else format_seconds
        values = ["" if value is None else unit(value) for value in (row.predicted, row.measured)]
        cells.append(
            [
                *([row.where] if places else []),
                row.what,
                *values,
                "" if row.ratio is None else f"{row.ratio:.2f}",
            ]
        )
    headers = [title, *([""] if places else []), "predicted", "measured", "ratio"]
    return table(first_and_last(cells, 2 * MOST_ROWS), headers, "l" * (len(headers) - 3) + "rrr")
