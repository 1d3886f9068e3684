"""A rank's program, run alone, beside what its plan predicts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.formatting.table import WIDTH, Cells, format_bytes, format_seconds, table
from autopar.ir.plan_data import PlanData
from autopar.runtime.measure.compare import compute_rows
from autopar.runtime.measure.comparison import MEMORY, TOTAL, Row
from autopar.runtime.measure.step_recorder import RankTimes

UNKNOWN = (
    "not rehearsed: the time of communication, what of it is hidden, and what ranks lose by "
    "sharing links, hosts or cores; values (what a rank receives is random, so the loss means "
    "nothing, and the routing of tokens to experts is not that of training); the memory of the "
    "communication library"
)


@dataclass(frozen=True)
class Rehearsal:
    """The result of :meth:`Plan.rehearse`. Times are medians over steps, and those of a stage are
    the sum over all microbatches of a step, without conversions.

    Attributes:
        rank, world_size: the rank of the plan that was rehearsed, and of how many.
        cluster: the name of the cluster that the plan was made for.
        device: the name of the device that ran it.
        backend: what ran it, "eager" or "inductor".
        steps: the number of counted steps.
        rows: the numbers: seconds of "forward" and "backward" of each of the rank's stages, of
            "optimizer", and their "total"; bytes of memory by kind, and the "peak memory". What was
            not measured is None.
        notes: sentences for the user about this rehearsal.
    """

    rank: int
    world_size: int
    cluster: str
    device: str
    backend: str
    steps: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def row(self, what: str, where: str = "") -> Row:
        """The row of a number, such as "forward" of "stage 0"; where it is not given, of any."""
        return next(row for row in self.rows if row.what == what and where in ("", row.where))

    @property
    def compute(self) -> float:
        """Measured seconds of a step that the rank computes: forwards, backwards, optimizer."""
        return self.row(TOTAL).measured or 0.0

    @property
    def peak_memory(self) -> float | None:
        """Measured peak bytes of a step; None where it was not measured."""
        return self.row(MEMORY).measured

    def numbers(self) -> dict[str, float]:
        """All numbers under flat names: "stage 0/forward/predicted", "rank 3/peak memory/
        rehearsed", … in seconds and bytes. What is missing is left out.
        """
        return {
            f"{row.where}/{row.what}/{kind}": value
            for row in self.rows
            for kind, value in (("predicted", row.predicted), ("rehearsed", row.measured))
            if value is not None
        }

    def __str__(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        title = (
            f"rank {self.rank} of {self.world_size} of a plan for {self.cluster}, rehearsed alone "
            f"on {self.device}, backend {self.backend}: median of {steps}"
        )
        seconds = [row for row in self.rows if not _is_memory(row)]
        memory = [row for row in self.rows if _is_memory(row)]
        texts = [*self.notes, "ratio: rehearsed to predicted; " + UNKNOWN]
        parts = [
            textwrap.fill(title, WIDTH),
            table(list(_cells(seconds)), ["compute", "", *_HEADERS], "llrrr"),
            table(list(_cells(memory)), ["memory", "", *_HEADERS], "llrrr"),
            "\n".join(textwrap.fill(text, WIDTH) for text in texts),
        ]
        return "\n\n".join(parts) + "\n"


_HEADERS = ["predicted", "rehearsed", "ratio"]
_KIND = "bytes of "  # before the kinds of memory, whose names are those of seconds too


def _is_memory(row: Row) -> bool:
    return row.what == MEMORY or row.what.startswith(_KIND)


def _cells(rows: list[Row]) -> Iterator[Cells]:
    for row in rows:
        unit = format_bytes if _is_memory(row) else format_seconds
        numbers = ["" if n is None else unit(n) for n in (row.predicted, row.measured)]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        yield [row.where, row.what.removeprefix(_KIND), *numbers, ratio]


def rehearsed_rows(
    plan: PlanData, rank: int, times: RankTimes, lasting: dict[str, int]
) -> tuple[Row, ...]:
    """The predictions of ``plan`` for ``rank`` beside its measurements ``times``; ``lasting`` are
    the measured bytes of the kinds of memory that stay between steps.
    """
    where = f"rank {rank}"
    rows = [row for i, took in times.stages.items() for row in compute_rows(plan, i, took)]
    update = sum(plan.stages[i].seconds.get("optimizer", 0.0) for i in times.stages)
    rows.append(Row(where, "optimizer", update, times.seconds["optimizer"]))
    predicted = sum(row.predicted or 0.0 for row in rows)
    rows.append(Row(where, TOTAL, predicted, sum(row.measured or 0.0 for row in rows)))
    memory = plan.memory[times.rank]
    for kind, nbytes in memory.items():
        if nbytes or lasting.get(kind):
            found = lasting.get(kind)
            rows.append(Row(where, _KIND + kind, nbytes, None if found is None else float(found)))
    peak = None if times.nbytes is None else float(times.nbytes)
    return (*rows, Row(where, MEMORY, plan.peak_memory[times.rank], peak))
