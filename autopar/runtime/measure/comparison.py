"""What a plan predicted beside what its steps took, for people, for a file and for
:meth:`Cluster.calibrated`.
"""

from __future__ import annotations

import json
import os
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.cost_model.plan_timeline import simulate_plan
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
from autopar.ir.plan_data import PlanData
from autopar.runtime.measure.step_recorder import RankTimes

VERSION = 1
STEP, OTHER, TOTAL, MEMORY = "step", "other", "total", "peak memory"


@dataclass(frozen=True)
class Row:
    """One number, predicted and measured.

    Attributes:
        where: "step", "stage 0", …, or "rank 0", … of the pipeline.
        what: a kind of :attr:`Plan.seconds`, "forward", "backward", "waiting", "peak memory", …
        predicted, measured: seconds, or bytes of "peak memory"; None where nothing was.
    """

    where: str
    what: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured to predicted; None where one of them is missing."""
        return (
            self.measured / self.predicted if self.predicted and self.measured is not None else None
        )


@dataclass(frozen=True)
class Comparison:
    """What :meth:`Compiled.compare` found: medians over steps, means over the ranks that share a
    pipeline rank (of memory the most).

    Times of a "step" are those of the pipeline rank that works longest, and add up. A stage's are
    of all microbatches of a step; its "forward" and "backward" are without "conversions".
    Conversions that are made again in the backward are predicted as compute.

    Attributes:
        cluster: the name of the cluster that the plan was made for.
        fingerprint, world_size: the plan's.
        steps: how many steps counted, on the rank with fewest.
        rows: all the numbers.
        links: the part of the predicted seconds of "compute", "conversions" and "gradient
            synchronisation" that goes over links.
    """

    cluster: str
    fingerprint: str
    world_size: int
    steps: int
    rows: tuple[Row, ...]
    links: dict[str, float]

    @property
    def predicted(self) -> dict[str, float]:
        """Seconds of a step by kind, and their "total"."""
        return {
            row.what: row.predicted
            for row in self.rows
            if row.where == STEP and row.predicted is not None
        }

    @property
    def measured(self) -> dict[str, float]:
        """The same."""
        return {
            row.what: row.measured
            for row in self.rows
            if row.where == STEP and row.measured is not None
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
        """Write it as JSON: the whole file or nothing."""
        write_json(path, {"version": VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Comparison:
        """Read what :meth:`save` wrote. PlanError where the file is no comparison, damaged, or of
        another version.
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
            found = Comparison(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})
            _check(found)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise PlanError(
                f"{name} is a damaged comparison: {e!r}. Compare again, or undo the edit"
            ) from e
        return found


def _check(found: Comparison) -> None:
    numbers = [n for row in found.rows for n in (row.predicted, row.measured) if n is not None]
    for n in (*numbers, *found.links.values(), found.steps, found.world_size):
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


def compare(plan: PlanData, ranks: Sequence[RankTimes]) -> Comparison:
    """``plan``, which has one of ``ranks`` for each rank, beside what they measured."""
    devices = [
        _together([times for times in ranks if times.rank == rank]) for rank in range(plan.pipeline)
    ]
    rows = (*_step(plan, devices), *_stages(plan, devices), *_devices(plan, devices))
    return Comparison(
        plan.cluster,
        plan.fingerprint,
        plan.world_size,
        min(times.steps for times in ranks),
        rows,
        _links(plan),
    )


def _together(ranks: Sequence[RankTimes]) -> RankTimes:
    """Ranks that do the same as one."""

    def mean(values: Sequence[dict[str, float]]) -> dict[str, float]:
        return {kind: statistics.fmean(each[kind] for each in values) for kind in values[0]}

    stages = {i: mean([times.stages[i] for times in ranks]) for i in ranks[0].stages}
    known = [times.nbytes for times in ranks if times.nbytes is not None]
    return RankTimes(
        ranks[0].steps,
        ranks[0].rank,
        mean([times.seconds for times in ranks]),
        stages,
        max(known, default=None),
    )


def _computed(times: RankTimes) -> float:
    return sum(took["forward"] + took["backward"] for took in times.stages.values())


def _converted(took: dict[str, float]) -> float:
    return took["forward conversions"] + took["backward conversions"]


def _step(plan: PlanData, devices: Sequence[RankTimes]) -> Iterator[Row]:
    once = ("gradient synchronisation", "optimizer")
    busiest = max(
        devices, key=lambda times: _computed(times) + sum(times.seconds[kind] for kind in once)
    )
    converted = sum(map(_converted, busiest.stages.values()))
    measured = {"compute": _computed(busiest) - converted, "conversions": converted} | {
        kind: busiest.seconds[kind] for kind in once
    }
    if plan.pipeline > 1:
        measured["bubble"] = busiest.seconds["schedule"] - _computed(busiest)
    predicted = {
        **plan.seconds,
        "compute": plan.seconds["compute"] + plan.seconds.get("recomputation", 0.0),
    }
    for kind, took in measured.items():
        if took or predicted.get(kind) or kind in ("compute", "optimizer"):
            yield Row(STEP, kind, predicted.get(kind, 0.0), took)
    yield Row(STEP, OTHER, None, busiest.seconds["step"] - sum(measured.values()))
    yield Row(STEP, TOTAL, plan.step_time, busiest.seconds["step"])


def _stages(plan: PlanData, devices: Sequence[RankTimes]) -> Iterator[Row]:
    for i, stage in enumerate(plan.stages):
        took, where, times = devices[i % plan.pipeline].stages[i], f"stage {i}", plan.microbatches
        converted = stage.seconds.get("conversions", 0.0)
        yield Row(
            where,
            "forward",
            stage.seconds["forward"] * times,
            took["forward"] - took["forward conversions"],
        )
        yield Row(
            where,
            "backward",
            (stage.seconds["backward"] - converted) * times,
            took["backward"] - took["backward conversions"],
        )
        if converted or _converted(took):
            yield Row(where, "conversions", converted * times, _converted(took))


def _devices(plan: PlanData, devices: Sequence[RankTimes]) -> Iterator[Row]:
    line = simulate_plan(plan) if plan.pipeline > 1 else None
    for rank, times in enumerate(devices):
        if line is not None:
            for kind in ("gradient synchronisation", "optimizer"):
                once = sum(
                    stage.seconds.get(kind, 0.0) for stage in plan.stages[rank :: plan.pipeline]
                )
                yield Row(f"rank {rank}", kind, once, times.seconds[kind])
            waits = line.ends[rank][-1] - line.busy[rank]
            yield Row(
                f"rank {rank}", "waiting", waits, times.seconds["schedule"] - _computed(times)
            )
        yield Row(
            f"rank {rank}",
            MEMORY,
            plan.peak_memory[rank],
            None if times.nbytes is None else float(times.nbytes),
        )


def _links(plan: PlanData) -> dict[str, float]:
    """What is no copy; a plan that no search wrote down has no rows, and no copies."""
    kinds = dict.fromkeys(("compute", "conversions", "gradient synchronisation"), 0.0)
    if "collectives" not in plan.rows:
        return kinds | {
            kind: plan.seconds.get(kind, 0.0)
            for kind in ("conversions", "gradient synchronisation")
        }
    for part, _, axis, *_, took in plan.rows["collectives"]:
        kinds["compute" if part == "recomputation" else part] += took if axis >= 0 else 0.0
    return kinds
