"""The plan that a user reads, edits, saves and loads."""

from __future__ import annotations

import dataclasses
import os

from autopar.formatting.files import write_json
from autopar.ir.plan_data import VERSION, PlanData
from autopar.ir.plan_json import read_plan, to_json_data
from autopar.report import chrome_trace, draw_timeline, report_text


@dataclasses.dataclass(frozen=True)
class Plan(PlanData):
    """A distributed program for one model, one sample input and one cluster.

    The attributes are those of :class:`autopar.ir.plan_data.PlanData`.
    """

    @classmethod
    def of(cls, data: PlanData) -> Plan:
        """The same plan, with the methods that a user calls."""
        return cls(**{f.name: getattr(data, f.name) for f in dataclasses.fields(PlanData)})

    def report(self) -> str:
        """A text with the mesh, the layout of each block, the collectives, memory and time."""
        return report_text(self)

    def timeline(self) -> str:
        """The timeline of a step as text: one row for each pipeline rank, one letter a phase."""
        return draw_timeline(self)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline of a step as a trace for Perfetto or Chrome.

        Where writing fails, ``path`` stays unchanged.
        """
        write_json(path, chrome_trace(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Where writing fails, ``path`` stays unchanged."""
        write_json(path, {"version": VERSION, **to_json_data(self)}, indent=1)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that :meth:`save` wrote.

        Raises:
            PlanError: the file cannot be read, holds no plan, has another version, or is damaged.
        """
        return read_plan(path, VERSION, Plan)
